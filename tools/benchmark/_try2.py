import sys, time, torch, itertools, gc
import torch.nn.functional as F
import opensora.acceleration.few_keys_attention as K
dev="cuda"
def clock(f,n=20):
    for _ in range(3): f()
    torch.cuda.synchronize(); t=time.perf_counter()
    for _ in range(n): f()
    torch.cuda.synchronize(); return (time.perf_counter()-t)/n*1e3
def spatial():
    qkv=torch.randn(128,256,3456,device=dev,dtype=torch.bfloat16); g=torch.randn(128,256,1152,device=dev,dtype=torch.bfloat16)
    def sd():
        x=qkv.detach().requires_grad_(); q,k,v=(p.unflatten(-1,(16,72)).transpose(1,2) for p in x.chunk(3,-1))
        return x,F.scaled_dot_product_attention(q,k,v).transpose(1,2).flatten(-2)
    print("spatial sdpa fwd",clock(lambda: sd()),"f+b",clock(lambda: sd()[1].backward(g)),flush=True)
    for bq,bk,w,s in [(128,128,8,2),(128,128,4,2),(64,128,4,2),(128,64,4,2),(128,64,8,2),(64,64,4,2),(128,64,4,3),(64,256,4,2),(128,256,8,1),(64,128,4,3)]:
        K.FORWARD={"BLOCK_Q":bq,"BLOCK_K":bk,"num_warps":w,"num_stages":s}
        try: print("fwd",bq,bk,w,s,f"{clock(lambda: K.few_keys_attention_packed(qkv,16)):.3f}",flush=True)
        except Exception as e: print("fwd",bq,bk,w,s,type(e).__name__,str(e)[:80],flush=True)
    K.FORWARD={"BLOCK_Q":64,"BLOCK_K":128,"num_warps":4,"num_stages":2}
    out,lse=K.few_keys_attention_packed(qkv,16)
    for bq,bk,w,s in [(64,128,8,2),(64,128,4,2),(64,64,4,2),(32,128,4,2),(32,64,4,2),(64,128,8,1),(64,64,4,1),(32,128,8,2),(128,128,8,1),(64,64,8,2),(32,128,4,3),(64,64,4,3)]:
        K.BACKWARD={"BLOCK_Q":bq,"BLOCK_K":bk,"num_warps":w,"num_stages":s}
        try: print("bwd",bq,bk,w,s,f"{clock(lambda: K.few_keys_attention_packed_backward(g,qkv,out,lse,16)):.3f}",flush=True)
        except Exception as e: print("bwd",bq,bk,w,s,type(e).__name__,str(e)[:80],flush=True)
def cross():
    q=torch.randn(8,4096,16,72,device=dev,dtype=torch.bfloat16).transpose(1,2); k,v=(torch.randn(8,120,16,72,device=dev,dtype=torch.bfloat16).transpose(1,2) for _ in range(2))
    g=torch.randn(8,4096,16,72,device=dev,dtype=torch.bfloat16).transpose(1,2)
    mask=torch.ones(8,120,dtype=torch.bool,device=dev)
    for m in (None,mask):
        def sd():
            a,b,c=(x.detach().requires_grad_() for x in (q,k,v))
            return F.scaled_dot_product_attention(a,b,c,attn_mask=None if m is None else m[:,None,None])
        print("cross sdpa mask",m is not None,"fwd",clock(sd),"f+b",clock(lambda: sd().backward(g)),flush=True)
    for bq,bk,w,s in [(128,128,8,2),(128,128,4,2),(64,128,4,2),(64,64,4,2),(128,64,4,2),(128,128,4,1)]:
        K.FORWARD={"BLOCK_Q":bq,"BLOCK_K":bk,"num_warps":w,"num_stages":s}
        print("cross fwd",bq,bk,w,s,f"{clock(lambda: K.few_keys_attention(q,k,v,mask)):.3f}",flush=True)
    out,lse=K.few_keys_attention(q,k,v,mask)
    for bq,bk,w,s in [(64,128,8,2),(64,128,4,2),(64,64,4,2),(32,128,4,2),(32,64,4,2),(64,128,8,1),(128,128,8,1),(32,128,8,2)]:
        for P in (512,1024,2048):
            K.BACKWARD={"BLOCK_Q":bq,"BLOCK_K":bk,"num_warps":w,"num_stages":s}; K._PROGRAMS=P
            try: print("cross bwd",bq,bk,w,s,P,f"{clock(lambda: K.few_keys_attention_backward(g,q,k,v,mask,out,lse)):.3f}",flush=True)
            except Exception as e: print("cross bwd",bq,bk,w,s,type(e).__name__,str(e)[:80],flush=True)
from tests.acceleration.test_few_keys_attention import SELF,CROSS,compare_self,compare_cross
if __name__=="__main__":
    for dt,tol in ((torch.float32,1e-4),(torch.bfloat16,3e-2)):
        for s in SELF+[(4,16,256,72)]:
            try: compare_self(s,dev,dt,tol)
            except Exception as e: print("BAD self",s,dt,str(e)[:300])
        for s in CROSS+[(4,16,1024,120,72)]:
            for m in (False,True):
                try: compare_cross(s,masked=m,device=dev,dtype=dt,tolerance=tol)
                except Exception as e: print("BAD cross",s,m,dt,str(e)[:300])
    print("correct done",flush=True)
    spatial(); cross()
