"""The tables of a GPU's record, of another GPU than the one that is recorded."""

from benchmarks import gpu_report


def test_a_kernel_that_a_gpu_lacks_is_a_dash():
    shapes = [f"attention auto, {shape}" for shape in gpu_report.SHAPES]
    figures = {f"{name}: {what}": 2.0 for name in shapes for what in ("ms", "tflop_per_sec")}
    table = gpu_report.attention_table(figures, {f"{name}: ms": [1.0, 3.0] for name in shapes})
    assert table.splitlines()[2].endswith("| – | – | – | 2.0 (1.0 to 3.0) | 2 |")


def test_kernels_of_other_names_are_not_lost():
    kernels = [{"name": "cudnn_x", "share": 0.5}, {"name": "ampere_gemm", "share": 0.3}]
    rows = gpu_report.kernels_table({f"{x}, bf16, fused, jit": kernels for x in gpu_report.SECTIONS}).splitlines()
    assert [row.split("|")[2].strip() for row in rows[2:]] == ["50%", "0%", "0%", "30%", "20%"]
