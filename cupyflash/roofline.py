"""The roofline: a bound on speed from FLOPs, bytes and a machine's two peak rates; and a table of GPUs.

A kernel that does F FLOPs and moves B bytes takes at least max(F / peak, B / bandwidth). Its arithmetic
intensity is F / B; below the ridge, peak / bandwidth, the bytes decide, above it the FLOPs.

Peak rates are the vendor's, dense (no 2:4 sparsity), 16-bit products accumulated in float32, at boost clock.
Kernels do not reach them; they bound.

References
----------
Williams, Waterman, Patterson: Roofline: an insightful visual performance model for multicore
architectures, CACM 52(4), 2009.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Peak rates of one GPU: TFLOP/s by kind of product (None: the hardware lacks it) and GB/s of its memory.

    ``float16`` and ``bfloat16`` are on tensor cores with float32 sums, ``tf32`` is float32 input on tensor
    cores, ``float32`` plain FMA, ``float64`` the faster of tensor cores and FMA. ``source`` names the vendor's
    document.
    """

    float16: float
    bfloat16: float | None
    tf32: float | None
    float32: float
    float64: float
    bandwidth: float
    source: str

    def peak_flops(self, kind: str) -> float:
        """Peak FLOP/s for ``"float16"``, ``"bfloat16"``, ``"tf32"``, ``"float32"`` or ``"float64"``.

        Raises
        ------
        ValueError
            If the hardware lacks that kind of product.
        """
        rate = getattr(self, kind)
        if rate is None:
            raise ValueError(f"this GPU has no {kind} products: choose another dtype or precision")
        return rate * 1e12

    @property
    def peak_bytes(self) -> float:
        """Bytes a second of device memory."""
        return self.bandwidth * 1e9


_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper"
_ADA = "NVIDIA Ada GPU Architecture whitepaper"
_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper and datasheet"

GPUS = {
    "V100": Gpu(125, None, None, 15.7, 7.8, 900, "NVIDIA V100 datasheet (SXM2)"),
    "T4": Gpu(
        65, None, None, 8.1, 0.25, 320, "NVIDIA T4 datasheet; float64 from the Turing whitepaper's 1:32"
    ),
    "A100-40GB": Gpu(312, 312, 156, 19.5, 19.5, 1555, "NVIDIA A100 datasheet (SXM4)"),
    "A100-80GB": Gpu(312, 312, 156, 19.5, 19.5, 2039, "NVIDIA A100 datasheet (SXM4)"),
    "RTX3090": Gpu(71, 71, 35.6, 35.6, 0.556, 936, _GA102),
    "RTX4090": Gpu(165.2, 165.2, 82.6, 82.6, 1.29, 1008, _ADA),
    "L40S": Gpu(
        362.05, 362.05, 183, 91.6, 1.43, 864, "NVIDIA L40S datasheet; float64 from " + _ADA + "'s 1:64"
    ),
    "H100-PCIe": Gpu(756, 756, 378, 51, 51, 2000, _HOPPER),
    "H100-SXM": Gpu(989.4, 989.4, 494.7, 66.9, 66.9, 3350, _HOPPER),
    "H200": Gpu(989.4, 989.4, 494.7, 66.9, 66.9, 4800, "NVIDIA H200 datasheet (SXM); same GH100 as H100 SXM"),
    "RTX5090": Gpu(
        209.5, 209.5, 104.8, 104.8, 1.64, 1792, "NVIDIA RTX Blackwell GPU Architecture whitepaper"
    ),
    "B200": Gpu(2250, 2250, 1100, 80, 40, 8000, "NVIDIA Blackwell Architecture Technical Brief (HGX B200)"),
}


@dataclass(frozen=True)
class Bound:
    """The roofline at one arithmetic intensity.

    Attributes
    ----------
    seconds : float
        The least time.
    flops_per_second : float
        The rate that this time means.
    intensity, ridge : float
        FLOPs a byte of the work, and where the machine's two roofs meet.
    limit : str
        ``"compute"`` or ``"memory"``.
    """

    seconds: float
    flops_per_second: float
    intensity: float
    ridge: float
    limit: str


def roofline(flops: float, bytes_moved: float, peak_flops: float, peak_bytes: float) -> Bound:
    """Bound the time of ``flops`` FLOPs that move ``bytes_moved`` bytes.

    Parameters
    ----------
    flops, bytes_moved : float
        The work; not both 0.
    peak_flops, peak_bytes : float
        The machine: FLOP/s and byte/s, both positive.

    Returns
    -------
    Bound

    Examples
    --------
    >>> from cupyflash.roofline import roofline
    >>> roofline(1e12, 1e9, 100e12, 1e12).limit, roofline(1e12, 1e9, 100e12, 1e12).seconds
    ('compute', 0.01)
    """
    compute, memory = flops / peak_flops, bytes_moved / peak_bytes
    seconds = max(compute, memory)
    return Bound(
        seconds=seconds,
        flops_per_second=flops / seconds if seconds else 0.0,
        intensity=flops / bytes_moved if bytes_moved else float("inf"),
        ridge=peak_flops / peak_bytes,
        limit="compute" if compute >= memory else "memory",
    )
