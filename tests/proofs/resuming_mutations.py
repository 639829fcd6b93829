"""Do the tests of checkpoints and guards see a wrong line? Change one at a time, and run the tests that guard it.

    python tests/proofs/resuming_mutations.py [checkpoint stop ...]       all, or those in some files of utils/

`make mutations` runs it, too: about 10 minutes on 2 cores. A change that no test sees ends the run with code 1.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.proofs.mutate import main

FOUR, FULL = "interruptions -k 'dp and 4'", "interruptions -k full"
KILLED = "interruptions -k 'KILL and all'"
VALIDATION = "interruptions -k 'in and validation'"
# file, the line as it stands, the line as it is changed to, tests that must see it
MUTATIONS = [
    ("checkpoint/store", "        if found != size:\n", "        if False:\n", "interruptions -k truncated"),
    ("checkpoint/store", 'if info["format"] != FORMAT:', "if False:", "checkpoint -k format"),
    ("checkpoint/store", "        raise OSError(error)\n", "        return\n", FULL),
    ("checkpoint/weights", "x.flatten(0, 1) if name in stacked else x", "x", "checkpoint -k weights_leave"),
    ("checkpoint/store", "reverse=True)", "reverse=False)", "checkpoint -k newest"),
    ("checkpoint/store", "        remove([void])\n        folder.rename(void)\n", "        pass\n", "checkpoint -k older"),
    ("checkpoint/background", "        if path == self.newest:", "        if False:", "interruptions -k twice"),
    ("checkpoint/store", 'remove(folder.parent.glob("*.part"))', "pass", "checkpoint -k older"),
    ("checkpoint/background", "[self.keep :]", "[self.keep + 1 :]", "checkpoint -k newest"),
    ("checkpoint/background", 'if folder.name != info["best"]["name"])', ")", "checkpoint -k newest"),
    ("checkpoint/background", "checkpoint.set_aside(folder for", "checkpoint.remove(folder for", "checkpoint -k no_half"),
    ("checkpoint/background", 'checkpoint.remove(self.folder.glob("*.void"))', "pass", "interruptions -k truncated"),
    ("checkpoint/background", "        self._new_group()\n\n    def _tell", "\n    def _tell", "interruptions -k lost"),
    ("checkpoint/background", "        self.state.copy_to_host()\n", "", "interruptions -k 'SIGTERM and process'"),
    ("checkpoint/background", "self.failed = self.path.name if error else None", "pass", "interruptions -k unwritable"),
    ("checkpoint/state", "(generators.keys() if same_ranks else set())", "set()", "interruptions -k 'dp and 2'"),
    ("checkpoint/state", '{f"random.{name}" for name in self.shared_generators} |', "", "interruptions -k back"),
    ("checkpoint/state", "generators[name].set_state(self.host[name])", "pass", "interruptions -k 'tp and 2'"),
    ("checkpoint/state", " + (parameter in self.stacked)", "", "interruptions -k back"),
    ("checkpoint/state", "Shard(dim)", "Shard(0)", "interruptions -k back"),
    ("checkpoint/state", "            x.copy_(self.host[name])\n", "            pass\n", "checkpoint -k older"),
    ("ranks/stop", "and self.reason == \"SIGINT\":", "and False:", "guards -k ctrl"),
    ("ranks/stop", "            self.saved = now\n", "            pass\n", "stop"),
    ("ranks/stop", "and now > self.deadline:", "and False:", "stop"),
    ("ranks/stop", "signal.SIGTERM, signal.SIGUSR1, signal.SIGINT", "signal.SIGTERM, signal.SIGINT", "interruptions -k USR1"),
    ("ranks/stop", "op=dist.ReduceOp.MAX, group", "op=dist.ReduceOp.MIN, group", "interruptions -k USR1"),
    ("run/folder", "        check_same_training(found", "        str(found", "checkpoint -k decides"),
    ("run/folder", "if own := _find_own(config):", "if own := None:", "checkpoint -k own_run"),
    ("run/saving", "            self.best = self.best_before\n", "            pass\n", "checkpoint -k not_written"),
    ("files", "except (BlockingIOError, PermissionError):", "except KeyError:", "checkpoint -k in_use"),
    ("run/folder", 'file = path / "owner"\n', 'file = path / "lock"\n', "checkpoint -k holds_its"),
    ("files", 'event["iteration"] <= iteration and ', "", FULL),
    ("files", 'event["event"] != "epoch" or event["epoch"] <= epochs', "True", "interruptions -k twice"),
    ("record/run_logger", "iteration + (not is_redone) if", "iteration + 1 if", "interruptions -k twice"),
    ("record/run_logger", "            self.curves.points(next", "            str(next", "interruptions -k twice"),
    ("run/saving", "iteration % self.iterations == 0", "False", KILLED),
    ("run/saving", "        self.run.know_all_losses()\n", "", KILLED),
    ("run/saving", "list(run.losses),", "[],", "checkpoint -k stands"),
    ("run/saving", 'return path, info["best"]', "return path, NO_BEST", "checkpoint -k newest"),
    ("run/saving", 'info["epoch_losses"], info["skipped"]', '[], info["skipped"]', KILLED),
    ("run/saving", 'if info["train_samples"] != samples:', "if False:", "checkpoint -k other_data"),
    ("run/saving", 'run.state.scaler.load_state_dict(info["scaler"])', "pass", "checkpoint -k scale"),
    ("run/run", "observer.after_validation_batch(self.iteration)", "pass", VALIDATION),
    ("run/saving", "            raise Ended(NOT_SAVED)", "            pass", "interruptions -k unwritable"),
    ("record/run_logger", "checkpoint.set_aside(path for", "list(path for", "checkpoint -k older"),
    ("run/nonfinite", "if was_skipped and self.skipped <= SKIPS_ALLOWED:", "if was_skipped:", "guards -k nothing_else"),
    ("run/nonfinite", "            self.skipped = 0\n", "", "guards -k in_a_row"),
    ("run/run", 'if math.isfinite(record["loss"]):', "if True:", "guards -k is_skipped"),
    ("ranks/start", "world_size=world.size, timeout=wait)", "world_size=world.size, timeout=JOINING)", "guards -k waits"),
    ("ranks/start", "        store.set_timeout(wait)\n", "", "guards -k waited"),
    ("ranks/start", 'store.wait(["all are here"], JOINING)', "pass", "launch -k late"),
    ("run/setup", "    torch.stack([p.sum() for p in model.parameters()]).sum().backward()\n", "", FOUR),
    ("ranks/watchdog", "dist.recv(torch.zeros(1), src=self.before, group=self.group)", "pass", "guards -k waits"),
    ("ranks/start", "        code = 2\n    except ReadError", "        code = 1\n    except ReadError", "errors"),
]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main((f"utils/{name}.py", *change) for name, *change in MUTATIONS))
