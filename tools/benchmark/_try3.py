import sys, time, torch, gc
from opensora.registry import MODELS
from opensora.acceleration.distributed import World
from opensora.acceleration.engine import build_engine
from tools.benchmark.train_step import train
from tools.benchmark._try import table
dev="cuda" if torch.cuda.is_available() else "cpu"
def run(label, options, prof=False):
    torch._dynamo.reset(); gc.collect()
    if dev=="cuda": torch.cuda.empty_cache()
    torch.manual_seed(0)
    B,latent,name=(8,(16,32,32),"STDiT-XL/2") if dev=="cuda" else (1,(4,8,8),"STDiT-XS/2")
    with torch.device(dev): model=MODELS.build({"type":name},model_max_length=120).train()
    for b in model.transformer_blocks(): b.compile(fullgraph=True, options=options or None)
    opt=torch.optim.AdamW(model.parameters(),lr=1e-5,fused=dev=="cuda")
    e=build_engine("ddp",model,opt,World(0,1,torch.device(dev)),dtype="bf16",grad_clip=1.0)
    z=torch.randn(B,4,*latent,device=dev); y=torch.randn_like(model.null_condition(B))
    cond={"y":y,"mask":torch.ones(B,120,dtype=torch.bool,device=dev)}
    t=time.time(); train(e,z,cond,range(5)); c=time.time()-t
    s=min(train(e,z,cond,range(5+15*i,20+15*i))/15 for i in range(2))
    print("TIME",label,f"{s*1e3:.1f} ms, compile {c:.0f} s",f"peak {torch.cuda.max_memory_allocated()/2**30:.1f}" if dev=="cuda" else "",flush=True)
    if prof: table(e,z,cond,train)
V={"base":{}, "multi":{"triton.multi_kernel":1}, "coord":{"coordinate_descent_tuning":True}, "autotune":{"max_autotune_pointwise":True}, "multicoord":{"triton.multi_kernel":1,"coordinate_descent_tuning":True}}
for n in sys.argv[1:]:
    try: run(n,V[n.strip("+")],n.endswith("+"))
    except Exception as ex: print("FAIL",n,type(ex).__name__,str(ex)[:300],flush=True)
