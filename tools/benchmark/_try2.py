import sys, time, torch, itertools, gc
import torch.nn.functional as F
import opensora.acceleration.few_keys_attention as K
from tests.acceleration.test_few_keys_attention import SELF,CROSS,compare_self,compare_cross
dev="cuda"
def clock(f,n=20):
    for _ in range(3): f()
    torch.cuda.synchronize(); t=time.perf_counter()
    for _ in range(n): f()
    torch.cuda.synchronize(); return (time.perf_counter()-t)/n*1e3
def one(kind, bq,bk,w,s):
    torch.manual_seed(0)
    K.FORWARD={"BLOCK_Q":bq,"BLOCK_K":bk,"num_warps":w,"num_stages":s}
    K.BACKWARD=dict(K.FORWARD)
    if kind[0]=="s":
        qkv=torch.randn(128,256,3456,device=dev,dtype=torch.bfloat16); g=torch.randn(128,256,1152,device=dev,dtype=torch.bfloat16)
        if kind=="sf": t=clock(lambda: K.few_keys_attention_packed(qkv,16))
        else:
            K.FORWARD={"BLOCK_Q":128,"BLOCK_K":128,"num_warps":8,"num_stages":1}
            out,lse=K.few_keys_attention_packed(qkv,16)
            t=clock(lambda: K.few_keys_attention_packed_backward(g,qkv,out,lse,16))
    else:
        q=torch.randn(8,4096,16,72,device=dev,dtype=torch.bfloat16).transpose(1,2); k,v=(torch.randn(8,120,16,72,device=dev,dtype=torch.bfloat16).transpose(1,2) for _ in range(2))
        g=torch.randn(8,4096,16,72,device=dev,dtype=torch.bfloat16).transpose(1,2)
        mask=torch.ones(8,120,dtype=torch.bool,device=dev)
        if kind=="cf": t=clock(lambda: K.few_keys_attention(q,k,v,mask))
        else:
            K.FORWARD={"BLOCK_Q":128,"BLOCK_K":128,"num_warps":8,"num_stages":1}
            out,lse=K.few_keys_attention(q,k,v,mask)
            t=clock(lambda: K.few_keys_attention_backward(g,q,k,v,mask,out,lse))
    print("SWEEP",kind,bq,bk,w,s,f"{t:.3f}",flush=True)
def sweep():
    for kind in ("sf","cf"):
        for c in [(128,128,8,1),(64,128,4,1),(128,64,8,1),(64,64,4,1),(128,128,4,1),(64,128,8,1),(64,256,8,1)]: tryone(kind,*c)
    for kind in ("sb","cb"):
        for c in [(64,128,8,1),(64,128,8,2),(32,128,8,1),(32,128,8,2),(64,64,4,1),(64,64,4,2),(64,64,8,2),(32,64,4,1),(32,64,4,2),(128,64,8,1),(32,128,4,1)]: tryone(kind,*c)
def tryone(*a):
    try: one(*a)
    except Exception as e: print("SWEEP",a,type(e).__name__,str(e)[:80],flush=True)
def check():
    for s in [(2,2,40,72),(8,16,256,72),(2,2,130,64),(2,2,200,72)]:
        compare_self(s,dev,torch.bfloat16,5e-2); print("self ok",s,flush=True)
    for s in [(2,2,70,7,72),(4,16,1024,120,72),(1,2,16,150,64)]:
        for m in (False,True): compare_cross(s,masked=m,device=dev,dtype=torch.bfloat16,tolerance=5e-2); print("cross ok",s,m,flush=True)


if __name__=="__main__":
    if sys.argv[1]=="check": check()
    else: sweep()
