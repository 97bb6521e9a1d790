import argparse, sys, time, torch, gc
from opensora.registry import MODELS
import opensora.acceleration.attention as A
import opensora.models.layers.attention as L
import opensora.models.layers.modulation as M
from opensora.acceleration.compile import compile_blocks

dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cuda.matmul.allow_tf32 = False
XL = ["DiT-XL/2", "Latte-XL/2", "LatteT2V-XL/2", "PixArt-XL/2", "STDiT-XL/2", "STDiT3-XL/2"]


@torch.no_grad()
def precision(name, latent=(4, 32, 32), **kw):
    torch.manual_seed(0)
    with torch.device(dev):
        model = MODELS.build({"type": name, **kw}).eval()
        for p in model.parameters():
            if not p.any():
                p.normal_(std=0.02)
        x, y = torch.randn(2, model.in_channels, *latent), torch.randn_like(model.null_condition(2))
        sizes = {"fps": 8.0, "height": 8.0 * latent[1], "width": 8.0 * latent[2], "num_frames": float(latent[0])}
        cond = {k: torch.full((2,), v) for k, v in sizes.items()}
        t = torch.tensor([37.0, 801.0])
    exact = model(x, t, y, **cond)

    def err():
        with torch.autocast(dev, torch.bfloat16):
            s = model(x, t, y, **cond)
        return float((s - exact).norm() / exact.norm())

    out = {"eager": err()}
    old = model.patchify
    model.patchify = lambda v: old(v).float()
    out["fp32res"] = err()
    model.patchify = lambda v: _f32patch(model, v, old)
    out["fp32patch+res"] = err()

    def bf(v):
        return _f32patch(model, v, old).bfloat16()

    model.patchify = bf
    out["fp32patch"] = err()
    model.patchify = old
    fl = model.final_layer.forward

    def ffl(x, *a, **k):
        with torch.autocast(dev, enabled=False):
            return fl(x.float(), *a, **k)

    model.final_layer.forward = ffl
    out["fp32final"] = err()
    model.final_layer.forward = fl
    compile_blocks(model.transformer_blocks())
    out["compiled"] = err()
    model.final_layer.forward = ffl
    out["comp+final"] = err()
    torch._dynamo.reset()
    gc.collect()
    print("PREC", name, {k: f"{v:.3%}" for k, v in out.items()}, flush=True)


def _f32patch(model, v, old):
    with torch.autocast(dev, enabled=False):
        return old(v)


def profile(packed, mask):
    from opensora.acceleration.distributed import World
    from opensora.acceleration.engine import build_engine
    from tools.benchmark.train_step import train

    model_name = "STDiT-XL/2" if dev == "cuda" else "STDiT-XS/2"
    torch.manual_seed(0)
    B = 8 if dev == "cuda" else 1
    latent = (16, 32, 32) if dev == "cuda" else (4, 8, 8)
    with torch.device(dev):
        model = MODELS.build({"type": model_name}, model_max_length=120).train()
    if packed:
        from opensora.acceleration.short_attention import short_attention_packed

        for b in model.blocks:
            a = b.attn_temp
            a.forward = (
                lambda a: lambda x, rope=None, grid=None: a.proj(short_attention_packed(a.qkv(x), a.num_heads))
            )(a)
    compile_blocks(model.transformer_blocks())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=dev == "cuda")
    e = build_engine("ddp", model, opt, World(0, 1, torch.device(dev)), dtype="bf16", grad_clip=1.0)
    z = torch.randn(B, 4, *latent, device=dev)
    y = torch.randn_like(model.null_condition(B))
    cond = {"y": y}
    if mask:
        cond["mask"] = torch.ones(B, 120, dtype=torch.bool, device=dev)
    train(e, z, cond, range(5))
    s = train(e, z, cond, range(5, 20)) / 15
    print("TIME packed", packed, "mask", mask, f"{s * 1e3:.1f} ms", flush=True)
    return e, z, cond, train


def table(e, z, cond, train):
    from torch.profiler import profile as P, ProfilerActivity as PA

    with P(activities=[PA.CUDA]) as p:
        train(e, z, cond, range(20, 22))
    ev = [k for k in p.key_averages() if k.device_time_total > 0]
    ev.sort(key=lambda k: -k.device_time_total)
    print("TOTAL", sum(k.self_device_time_total for k in ev) / 2000)
    for k in ev[:45]:
        print(f"{k.self_device_time_total / 2000:8.2f} ms {k.count // 2:5d} {k.key[:110]}", flush=True)


if __name__ == "__main__":
    what = sys.argv[1:]
    if "prof" in what:
        r = profile(False, True)
        table(*r)
        del r
        gc.collect()
        torch._dynamo.reset()
    if "packed" in what:
        r = profile(True, True)
        del r
        gc.collect()
        torch._dynamo.reset()
        r = profile(True, False)
        table(*r)
        del r
        gc.collect()
        torch._dynamo.reset()
    if "prec" in what:
        for n in XL if dev == "cuda" else ["STDiT-XS/2", "DiT-S/2"]:
            precision(n)
