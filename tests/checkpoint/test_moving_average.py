"""The moving average of the weights: what it is, on every grid; in checkpoints, in validation, after a restart."""

from unittest import mock

import pytest
import torch

import train
from tests.helpers import ROOT, losses, records, run_folder, run_here, run_ranks, tiny_flags
from tests.marks import at_night
from utils.checkpoint import store as checkpoint
from utils.checkpoint import weights as weights_file
from utils.checkpoint.__main__ import main as checkpoint_main
from utils.config.reader import load_config
from utils.errors import Ended
from utils.run.saving import Saving

DECAY = 0.4  # reached after five steps: (1 + t) / (10 + t)
AVERAGED = ["--ema_decay", str(DECAY), "--num_iters", "8", "--checkpoint_every", "1", "--keep_checkpoints", "99"]
GRIDS = {
    "1GPU": (1, "train.py", []),
    "2GPU": (2, "train.py", []),
    "2MP": (2, "train_mp.py", ["--tensor_parallel", "2"]),
    "4MP": (4, "train_mp.py", ["--tensor_parallel", "2", "--context_parallel", "2"]),
}


def weights(folder, iteration: int, kind: str) -> dict[str, torch.Tensor]:
    (path,) = (p for p in checkpoint.find(folder / "checkpoints") if int(p.name[:8]) == iteration)
    return weights_file.read_weights(path, kind)


def average_by_hand(argv, folder) -> dict[str, torch.Tensor]:
    """Return the average of the weights that a run had after each step, in float64."""
    config = load_config(argv)[0].with_batches(1)
    average = {
        name: x.double() for name, x in train.build_model(config, train.WeatherData(config).fields).state_dict().items()
    }
    for i in range(1, 9):
        decay = min(DECAY, (1 + i) / (10 + i))
        now = weights(folder, i, "model")
        average = {name: decay * x + (1 - decay) * now[name].double() for name, x in average.items()}
    return average


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1GPU", at_night("2GPU"), at_night("2MP"), "4MP"])
def test_it_is_the_average_of_the_weights_on_every_grid(tiny, name):
    ranks, script, grid = GRIDS[name]
    argv = tiny_flags(tiny, *AVERAGED)
    done = run_ranks(ranks, [str(ROOT / script), *argv, *grid])
    assert done[0].returncode == 0, done[0].stderr
    folder = run_folder(argv, name)
    found, expected = weights(folder, 8, "ema"), average_by_hand(argv, folder)
    assert found.keys() == expected.keys()
    for key, x in found.items():
        torch.testing.assert_close(x.double(), expected[key], rtol=1e-5, atol=1e-7)
        now = weights(folder, 8, "model")[key]
        assert not torch.equal(x, now), key


def test_it_changes_no_training(tiny):
    with_it = losses(run_here(tiny_flags(tiny, *AVERAGED)))
    assert with_it == losses(run_here(tiny_flags(tiny, "--num_iters", "8")))


def test_a_run_that_goes_on_goes_on_with_its_average(tiny):
    folder = run_here(tiny_flags(tiny, *AVERAGED))
    whole = weights(folder, 8, "ema")
    run_here(tiny_flags(tiny, *AVERAGED, "--resume", str(folder / "checkpoints/00000003")))
    for name, x in weights(folder, 8, "ema").items():
        assert torch.equal(x, whole[name]), name
    with pytest.raises(ValueError, match="was trained with ema_decay 0.4, and now it is None"):
        run_here(tiny_flags(tiny, "--num_iters", "8", "--resume", str(folder / "checkpoints/00000003")))


def test_it_is_validated_beside_the_weights_and_can_be_exported(tiny, tmp_path):
    folder = run_here(tiny_flags(tiny, *AVERAGED))
    last = records(folder, "epoch")[-1]
    assert last["valid_loss_ema"] != last["valid_loss"]
    assert "  Avg val loss of the moving average=" in (folder / "out.log").read_text()
    for options, key in (([], "valid_loss"), (["--ema"], "valid_loss_ema")):
        file = tmp_path / "weights.pt"
        assert checkpoint_main(["export", str(folder), str(file), *options]) == 0
        still = ["--lr", "0", "--num_iters", "1", "--init_from", str(file), "--run_num", "still"]
        assert records(run_here(tiny_flags(tiny, *still)), "epoch")[-1]["valid_loss"] == pytest.approx(
            last[key], rel=1e-6
        )
    with pytest.raises(ValueError, match="holds no moving average"):
        weights_file.export(tiny / "runs/tiny/1GPU/still", tmp_path / "none.pt", ema=True)


def test_a_stop_during_its_validation_saves_the_weights_themselves(tiny):
    folder = run_here(tiny_flags(tiny, *AVERAGED))
    whole = {kind: weights(folder, 2, kind) for kind in ("model", "ema")}  # two iterations are an epoch
    stopped = tiny_flags(tiny, *AVERAGED, "--run_num", "stopped")

    def stop_if_asked(saving, iteration, original=Saving.after_validation_batch):
        is_its_validation = saving.checkpointer.state.average.is_in_place
        with mock.patch.object(saving.requests, "agree", lambda kind: (is_its_validation, False)):
            original(saving, iteration)

    with mock.patch.object(Saving, "after_validation_batch", stop_if_asked), pytest.raises(Ended):
        run_here(stopped)
    for kind, expected in whole.items():
        for name, x in weights(run_folder(stopped), 2, kind).items():
            assert torch.equal(x, expected[name]), (kind, name)
    run_here([*stopped, "--resume", "auto"])
    assert losses(run_folder(stopped)) == losses(folder)
