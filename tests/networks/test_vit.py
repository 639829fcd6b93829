"""The model: its shapes, its parts, its rules."""

import collections
import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from networks.attention import check_attention, pick_attention
from networks.vit import Attention, DropPath, ViT, unpatchify
from utils.compiler import compile_modules


def vit(**changes) -> ViT:
    torch.manual_seed(0)
    sizes = dict(img_size=(16, 24), patch_size=4, in_chans=3, out_chans=2, embed_dim=32, depth=3, num_heads=4)
    return ViT(**{**sizes, **changes})


def test_parameter_count_and_names():
    model = vit()
    D, N, P2 = 32, 24, 16
    block = 4 * D + (3 * D * D + 3 * D) + (D * D + D) + (4 * D * D + 4 * D) + (4 * D * D + D)
    assert sum(p.numel() for p in model.parameters()) == (3 * P2 + 1) * D + N * D + 3 * block + 2 * D + D * 2 * P2
    assert model.head.bias is None and model.blocks[0].attn.qkv.bias is not None
    assert {m.eps for m in model.modules() if isinstance(m, torch.nn.LayerNorm)} == {1e-6}


def test_init_is_truncated_normal_with_std_002():
    model = vit(embed_dim=128)
    for weight in (model.pos_embed, model.patch_embed.proj.weight, model.blocks[1].mlp.fc1.weight, model.head.weight):
        assert 0.018 < weight.std().item() < 0.022 and abs(weight.mean().item()) < 1e-3
    assert all((m.bias == 0).all() for m in model.modules() if isinstance(m, torch.nn.Linear) and m.bias is not None)


def test_patches_are_row_major_and_return_to_their_places():
    model = vit(in_chans=2)
    x = torch.arange(2 * 16 * 24.0).view(1, 2, 16, 24)
    model.patch_embed.proj = torch.nn.Identity()
    tokens = model.patch_embed(x)  # 1 N 2*16
    assert torch.equal(tokens[0, 7], x[0, :, 4:8, 4:8].reshape(-1))  # second row of six patches, second column
    assert torch.equal(unpatchify(tokens, (16, 24), 4), x)


def test_embedding_equals_a_strided_convolution():
    model = vit()
    weight = model.patch_embed.proj.weight.view(32, 3, 4, 4)
    x = torch.randn(2, 3, 16, 24)
    conv = F.conv2d(x, weight, model.patch_embed.proj.bias, stride=4).flatten(2).transpose(1, 2)
    torch.testing.assert_close(model.patch_embed(x), conv)


def test_attention_equals_its_formula():
    torch.manual_seed(0)
    layer, x = Attention(32, 4, 0.0, "auto"), torch.randn(2, 6, 32)
    q, k, v = layer.qkv(x).view(2, 6, 3, 4, 8).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1)
    torch.testing.assert_close(layer(x), layer.proj((weights @ v).transpose(1, 2).reshape(2, 6, 32)))


def test_blocks_are_pre_norm():
    block, x = vit().blocks[0], torch.randn(2, 24, 32)
    y = x + block.attn(block.norm1(x))
    torch.testing.assert_close(block(x), y + block.mlp.fc2(F.gelu(block.mlp.fc1(block.norm2(y)))))


def test_every_parameter_has_a_gradient():
    model = vit()
    model(torch.randn(2, 3, 16, 24)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_residual_adds_the_scaled_change_to_its_channel():
    plain, x = vit(), torch.randn(2, 3, 16, 24)
    model = vit(residual=[2, 0], residual_scale=[0.5, 3.0])
    model.load_state_dict(plain.state_dict())  # the constants are no part of the weights
    y = plain(x)
    torch.testing.assert_close(model(x), torch.stack([x[:, 2] + 0.5 * y[:, 0], x[:, 0] + 3 * y[:, 1]], dim=1))


def test_dropout_acts_in_training_and_not_in_eval():
    model, x = vit(dropout=0.2, drop_path=0.2), torch.randn(2, 3, 16, 24)
    assert not torch.equal(model(x), model(x))
    attention = model.blocks[0].attn
    attention.proj_drop.p = 0.0
    tokens = torch.randn(2, 24, 32)
    assert not torch.equal(attention(tokens), attention(tokens))  # the attention weights are dropped too
    model.eval()
    assert torch.equal(model(x), model(x)) and torch.equal(model(x), vit().eval()(x))


def test_drop_path_drops_whole_samples_and_keeps_the_mean():
    torch.manual_seed(0)
    dropped = DropPath(0.25)(torch.ones(4000, 3, 5))
    torch.testing.assert_close(dropped.unique(), torch.tensor([0.0, 1 / 0.75]))
    assert (dropped.amax((1, 2)) == dropped.amin((1, 2))).all() and abs(dropped.mean().item() - 1) < 0.05
    first, *others = (block.drop_path1 for block in vit(drop_path=0.2).blocks)
    assert isinstance(first, torch.nn.Identity)
    assert [round(1 - block.keep.item(), 6) for block in others] == [0.1, 0.2]


def test_refused_sizes():
    with pytest.raises(ValueError, match="16 x 24 does not divide into patches of 5"):
        vit(patch_size=5)
    with pytest.raises(ValueError, match="embed_dim 32 does not divide into 3 heads"):
        vit(num_heads=3)


BASE = dict(img_size=(360, 720), patch_size=8, in_chans=20, out_chans=20, embed_dim=384, depth=12, num_heads=8)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(residual=[2, 0], residual_scale=[0.5, 3.0]),
        dict(in_chans=2, out_chans=7),
        dict(patch_size=2, embed_dim=24, num_heads=3),
        dict(patch_size=8, depth=1, mlp_chunks=2),
        BASE,
    ],
)
def test_flops_equal_the_counted_matrix_products(changes):
    """On tensors that have a shape and no data. PyTorch counts products, and no attention kernel of a CPU."""
    with torch.device("meta"):
        model = vit(**changes, attention="math")
        x = torch.empty(1, changes.get("in_chans", 3), *changes.get("img_size", (16, 24)))
        with FlopCounterMode(display=False) as counter:
            model(x)
    assert model.flops() == counter.get_total_flops()
    if changes is BASE:  # as the README has it
        N, D = 4050, 384
        assert model.flops() == 12 * (24 * N * D**2 + 4 * N**2 * D) + 2 * 2 * N * 1280 * D


def test_same_seed_same_model():
    assert all(torch.equal(a, b) for a, b in zip(vit().parameters(), vit().parameters()))


@pytest.mark.parametrize("kernel", ["auto", "math", "flash"])
def test_attention_kernels_agree_on_the_cpu(kernel):
    x = torch.randn(2, 3, 16, 24)
    torch.testing.assert_close(vit(attention=kernel)(x), vit()(x), rtol=1e-4, atol=1e-5)
    check_attention(kernel, 8, torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("kernel", ["cudnn", "efficient"])
def test_a_kernel_that_the_device_lacks_is_refused(kernel):
    with pytest.raises(ValueError, match=f"attention '{kernel}' does not run on cpu .* take --attention auto"):
        check_attention(kernel, 8, torch.device("cpu"), None)


def test_cudnn_is_left_out_where_its_gradients_may_be_nan(monkeypatch):
    """On Hopper, where the last 128 keys are half full: 4,160 tokens and not 4,050. See `has_cudnn_fault`."""
    has, version = (9, 0), 92000
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: has)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr("networks.attention._runs", lambda kernel, *_: kernel != "flash" or has == (9, 0))

    def pick(name, tokens):
        return pick_attention(name, tokens, 64, torch.device("cuda"), torch.bfloat16, 0.0)

    assert [pick("auto", 4050), pick("auto", 4160)] == ["cudnn", "flash"] and pick("cudnn", 4050) == "cudnn"
    with pytest.raises(ValueError, match="of 4160 tokens: cuDNN before 9.26 .* take --attention auto"):
        pick("cudnn", 4160)
    version = 92600
    assert pick("auto", 4160) == pick("cudnn", 4160) == "cudnn"
    version, has = 92000, (8, 0)
    assert pick("auto", 4160) == "auto" and pick("cudnn", 4160) == "cudnn"


class Casts(TorchDispatchMode):
    """Counts the casts to bf16, by the shape of what is cast."""

    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            self.count[tuple(args[0].shape)] += 1
        return function(*args, **(kwargs or {}))


def test_autocast_casts_each_number_once():
    """Weights once in a forward pass, and tokens where float32 meets a matrix."""
    model, x = vit(depth=1, num_heads=2), torch.randn(2, 3, 16, 24)
    with Casts() as casts, torch.autocast("cpu", torch.bfloat16):
        model(x)
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    weights = collections.Counter(tuple(p.shape) for m in linears for p in m.parameters())
    tokens = {(2, 24, 32): 3, (2, 24, 48): 1}  # both norms' output and the last one's; the patches
    assert casts.count == weights + collections.Counter(tokens)


@pytest.mark.parametrize(
    "dtype, tokens, kernel",
    [(torch.bfloat16, 128, "math"), (torch.float16, 1023, "math"), (torch.bfloat16, 1024, "auto"), (None, 128, "auto")],
)
def test_auto_takes_the_formula_for_few_tokens_in_16_bits_on_a_cpu(dtype, tokens, kernel):
    assert pick_attention("auto", tokens, 8, torch.device("cpu"), dtype, 0.0) == kernel
    assert pick_attention("flash", tokens, 8, torch.device("cpu"), dtype, 0.0) == "flash"


def test_deep_models_with_drop_path_compile(monkeypatch):
    """Twelve blocks, twelve probabilities, one code: torch.compile gives up after eight versions of a function."""
    model, x = vit(depth=12, drop_path=0.2, dropout=0.1), torch.randn(2, 3, 16, 24)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    torch.compiler.reset()
    compile_modules(model, ["Block"], None)
    model(x).sum().backward()
    assert len(graphs) <= 2  # the first block has no DropPath
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), vit(depth=12).eval()(x))


def test_gradients_come_in_the_order_in_which_ddp_is_told_that_they_come():
    """utils/setup.settle_buckets takes the parameters from the last to the first: module by module, this is the order
    of a backward pass, so a bucket is sent as soon as its part of the model is done."""
    model, came = vit(), []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
    model(torch.randn(2, 3, 16, 24)).sum().backward()
    told = [name for name, _ in model.named_parameters()][::-1]
    came, told = ([name.rpartition(".")[0] for name in names if name != "pos_embed"] for names in (came, told))
    assert came == told


def test_blocks_compile_without_a_graph_break_for_every_kernel():
    for kernel in ("auto", "math"):
        block = vit(attention=kernel).blocks[0]
        x = torch.randn(2, 24, 32)
        torch.testing.assert_close(torch.compile(block, fullgraph=True, backend="eager")(x), block(x))
