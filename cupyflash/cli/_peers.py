"""Other libraries' attention on the same arrays: PyTorch's kernels, where it is installed and sees the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._case import Case

TORCH_KERNELS = {
    "torch flash": "FLASH_ATTENTION",
    "torch cudnn": "CUDNN_ATTENTION",
    "torch efficient": "EFFICIENT_ATTENTION",
    "torch math": "MATH",
}


def peer_calls(case: Case, backward: bool) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """(calls by library, reasons by library that is left out)."""
    if not case.on_device:
        return {}, {}
    try:
        import torch
    except ImportError:
        return {}, {"torch": "not installed"}
    if not torch.cuda.is_available():
        return {}, {"torch": "does not see the GPU"}
    if reason := _refusal(case):
        return {}, {"torch": reason}
    calls, left_out = {}, {}
    for name, kernel in TORCH_KERNELS.items():
        call = _torch_call(torch, case, kernel, backward)
        try:
            call()
        except (RuntimeError, ValueError, TypeError) as error:
            left_out[name] = str(error).strip().splitlines()[0]
        else:
            calls[name] = call
    return calls, left_out


def _refusal(case: Case) -> str | None:
    """Why scaled_dot_product_attention cannot compute the case; None if it can."""
    p = case.problem
    takes = {"scale", "causal", "backend", "deterministic"}
    others = sorted(name for name, value in case.options.items() if value is not None and name not in takes)
    if others:
        return f"takes no {', '.join(others)}"
    if p.causal and (p.seqlen_q != p.seqlen_k or p.bottom_right):
        return "its causal mask is for equal lengths alone"
    return None if len(p.lead) == 1 else "needs arrays (batch, heads, length, head_dim)"


def _torch_call(torch: Any, case: Case, kernel: str, backward: bool) -> Callable[[], Any]:
    """A call of one of PyTorch's kernels, or of its gradient."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    p = case.problem
    q, k, v = (torch.from_dlpack(x) for x in case.arrays)
    options = {"scale": p.scale, "is_causal": p.causal, "enable_gqa": p.group > 1}

    def forward() -> Any:
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    if not backward:
        return forward
    for x in (q, k, v):
        x.requires_grad_()
    held: list[Any] = []  # the forward's graph, made with the first call

    def gradients() -> Any:
        if not held:
            held.append(forward())
        dout = torch.from_dlpack(case.dout)
        return torch.autograd.grad(held[0], (q, k, v), dout, retain_graph=True)

    return gradients
