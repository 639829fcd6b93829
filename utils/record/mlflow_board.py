"""MLflow beside TensorBoard (`--tracker mlflow`): the same curves and pictures, and the files of a run at its end.

MLflow is an extra: `pip install -r requirements-mlflow.txt`. Its store is what MLFLOW_TRACKING_URI says; without it the
file mlflow.db in the folder of all runs, with pictures and files in mlruns/ beside it.
"""

import csv
import dataclasses
import importlib.util
import json
import logging
import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path

import numpy as np

from utils.config.settings import Config
from utils.errors import first_line
from utils.files import to_json

PLAIN = str.maketrans({"(": " ", ")": None, ",": None, "[": None, "]": None})  # MLflow forbids these in names
OF_A_URI = str.maketrans({"%": "%25", "?": "%3F", "#": "%23"})
AT_ONCE = 1000  # points that MLflow takes


def check_tracker(tracker: str) -> None:
    """Raise ValueError, with the remedy, where the tracker is not installed."""
    if tracker == "mlflow" and importlib.util.find_spec("mlflow") is None:
        raise ValueError(
            "tracker mlflow needs MLflow, which is not installed: `pip install -r requirements-mlflow.txt`, or leave "
            "--tracker out"
        )


def or_give_up(method: Callable) -> Callable:
    """Let training go on where the store fails: from then on nothing is sent."""

    @wraps(method)
    def careful(self, *args, **kwargs):
        if self.is_lost:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # of a server, a network, a database
            self.is_lost = True
            logging.warning("MLflow is lost (%s): training goes on without it", first_line(error))

    return careful


class MlflowBoard:
    """Has those methods of a SummaryWriter that a run uses.

    A run has one place in MLflow, whatever processes work on it; what an earlier process sent is not sent again.
    """

    def __init__(self, folder: Path, config: Config, goes_on: bool):
        self.is_lost = False
        self._open(folder, config, goes_on)

    @or_give_up
    def _open(self, folder: Path, config: Config, goes_on: bool) -> None:
        # A server that is gone shall not hold up training for long.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")  # s
        from mlflow import MlflowClient

        self.folder, self.metrics, self.sent = folder, [], {}
        uri, files = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            home = Path(config.expdir).resolve()
            uri, files = f"sqlite:///{str(home).translate(OF_A_URI)}/mlflow.db", (home / "mlruns").as_uri()
        self.client = MlflowClient(uri)
        found = self.client.get_experiment_by_name(config.config)
        experiment = found.experiment_id if found else self.client.create_experiment(config.config, files)
        place = str(folder.resolve())
        quoted = f'"{place}"' if "'" in place else f"'{place}'"
        runs = self.client.search_runs([experiment], f"tags.folder = {quoted}")
        self.has_history = goes_on and bool(runs)
        if self.has_history:
            self.run = runs[0].info.run_id
            self.client.update_run(self.run, "RUNNING")
            return
        name = "/".join(folder.parts[-2:])
        self.run = self.client.create_run(experiment, run_name=name, tags={"folder": place}).info.run_id
        for key, value in dataclasses.asdict(config).items():
            self.client.log_param(self.run, key, value)

    @or_give_up
    def add_scalar(self, name: str, value: float, step: int) -> None:
        from mlflow.entities import Metric

        name = name.translate(PLAIN)
        if name not in self.sent:
            history = self.client.get_metric_history(self.run, name) if self.has_history else []
            self.sent[name] = max((m.step for m in history), default=-1)
        if step > self.sent[name]:
            self.sent[name] = step
            self.metrics.append(Metric(name, float(value), int(1000 * time.time()), step))
            if len(self.metrics) == AT_ONCE:
                self.flush()

    @or_give_up
    def add_image(self, name: str, pixels: np.ndarray, step: int, dataformats: str = "HWC") -> None:
        self.client.log_image(self.run, pixels, artifact_file=f"pictures/{name.translate(PLAIN)}/{step:08d}.png")

    @or_give_up
    def add_text(self, name: str, text: str, step: int) -> None:
        self.client.log_text(self.run, text, f"texts/{name.translate(PLAIN)}.md")

    @or_give_up
    def flush(self) -> None:
        while self.metrics:
            batch, self.metrics = self.metrics[:AT_ONCE], self.metrics[AT_ONCE:]
            self.client.log_batch(self.run, batch)

    @or_give_up
    def close(self, status: str = "FINISHED") -> None:
        """Send the rest, and the run's files, and end it: FINISHED, FAILED, or KILLED where it can go on.

        Traces stay where they are: they are large, and a job at its limit has not long.
        """
        self.flush()
        for name in ("out.log", "metrics.jsonl", "config.yaml", "report/report.json"):
            if (path := self.folder / name).exists():
                self.client.log_artifact(self.run, str(path))
        self._send_tables(sorted(self.folder.glob("report/*.csv")))
        self.client.set_terminated(self.run, status)

    def _send_tables(self, paths: list[Path]) -> None:
        """Send tables as they are, and in the form that MLflow shows side by side for several runs."""
        tables = []
        for path in paths:
            with path.open(newline="") as file:
                columns, *rows = csv.reader(file)
            data = [[_number(cell) for cell in row] for row in rows]
            tables.append(f"report/{path.stem}.json")
            self.client.log_artifact(self.run, str(path), "report")
            self.client.log_text(self.run, to_json({"columns": columns, "data": data}), tables[-1])
        if tables:  # as MlflowClient.log_table says it, which needs pandas
            told = [{"path": name, "type": "table"} for name in tables]
            self.client.set_tag(self.run, "mlflow.loggedArtifacts", json.dumps(told))


def _number(cell: str) -> float | str | None:
    try:
        return float(cell) if cell else None
    except ValueError:
        return cell
