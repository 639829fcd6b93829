"""MLflow beside TensorBoard: in a store of its own kind, a file."""

import json
import math
import sqlite3

import pytest

from tests.helpers import losses, records, run_here, tiny_flags
from utils.record import mlflow_board as tracker

mlflow = pytest.importorskip("mlflow", reason="needs pip install -r requirements-mlflow.txt")


@pytest.mark.slow
def test_a_run_is_in_mlflow(tiny, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store = mlflow.MlflowClient(f"sqlite:///{tiny}/runs/mlflow.db")
    argv = tiny_flags(tiny, "--tracker", "mlflow", "--report", "--num_iters", "6", "--checkpoint_every", "3")
    argv += ["--plot_channels", "ch0"]
    folder = run_here(argv)

    def check():
        (run,) = store.search_runs([store.get_experiment_by_name("tiny").experiment_id])
        assert run.info.status == "FINISHED" and run.data.params["embed_dim"] == "32"
        steps = store.get_metric_history(run.info.run_id, "Loss/step")
        assert [m.value for m in steps] == losses(folder) and [m.step for m in steps] == list(range(1, 7))
        for name, key in (("Loss/valid", "valid_loss"), ("Avg samples per sec", "samples_per_sec")):
            history = store.get_metric_history(run.info.run_id, name)
            assert [m.step for m in history] == [event["iteration"] for event in records(folder, "epoch")]
            assert key != "valid_loss" or [m.value for m in history] == [e[key] for e in records(folder, "epoch")]
        assert "RMSE ch0/valid" in run.data.metrics and "Time/forward s" in run.data.metrics
        files = {file.path for file in store.list_artifacts(run.info.run_id)}
        assert files >= {"out.log", "metrics.jsonl", "config.yaml", "pictures", "report.json", "texts"}
        assert {file.path for file in store.list_artifacts(run.info.run_id, "report")} >= {
            f"report/{name}.{kind}" for name in ("speed", "time", "memory", "system_ranks") for kind in ("csv", "json")
        }
        speed = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/report/speed.json")
        values = [row[speed["columns"].index("samples_per_sec")] for row in speed["data"]]
        assert values[:-2] == [event["samples_per_sec"] for event in records(folder, "epoch")]  # and two means
        assert json.loads(run.data.tags["mlflow.loggedArtifacts"])[0] == {"path": "report/memory.json", "type": "table"}
        assert (tiny / "runs/mlruns").is_dir()
        assert [file.path for file in store.list_artifacts(run.info.run_id, "texts")] == ["texts/Report.md"]
        (pictures,) = store.list_artifacts(run.info.run_id, "pictures")
        assert len(store.list_artifacts(run.info.run_id, pictures.path)) == 3
        return run.info.run_id

    first = check()
    run_here([*argv, "--resume", str(folder / "checkpoints/00000004-validated")])  # the last epoch once more
    assert check() == first


@pytest.mark.slow
def test_a_folder_with_signs_that_mean_something_elsewhere(tiny, monkeypatch):
    """In a URI, and in what is searched for."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    runs = tiny / "o'neil 50%20?"
    runs.mkdir()
    argv = tiny_flags(tiny, "--tracker", "mlflow", "--num_iters", "2", "--checkpoint_every", "1", "--expdir", str(runs))
    folder = run_here(argv)
    run_here([*argv, "--resume", str(folder / "checkpoints/00000001")])
    assert (runs / "mlflow.db").is_file() and (runs / "mlruns").is_dir()
    assert "MLflow is lost" not in (folder / "out.log").read_text()
    with sqlite3.connect(runs / "mlflow.db") as database:
        assert database.execute("select count(*), min(status) from runs").fetchall() == [(1, "FINISHED")]


def test_a_store_that_fails_does_not_end_a_run(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/store.db")
    monkeypatch.chdir(tmp_path)  # where MLflow puts the files of a store that says nothing else
    plain = run_here(tiny_flags(tiny, "--run_num", "plain"))
    assert not (tmp_path / "store.db").exists()  # nobody asked for it

    def fail(*_):
        raise ConnectionError("no route to the store")

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", fail)
    folder = run_here(tiny_flags(tiny, "--tracker", "mlflow"))
    assert losses(folder) == losses(plain) and all(map(math.isfinite, losses(folder)))
    log = (folder / "out.log").read_text()
    assert (tmp_path / "store.db").exists() and not (tiny / "runs/mlflow.db").exists()
    assert log.count("MLflow is lost (no route to the store): training goes on without it") == 1


def test_mlflow_is_an_extra(monkeypatch):
    monkeypatch.setattr(tracker.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install -r requirements-mlflow.txt"):
        tracker.check_tracker("mlflow")
    tracker.check_tracker("none")
