"""Do the tests of reports, traces, the ladder and the doctor see a wrong line? Change one at a time.

    python tests/proofs/measuring_mutations.py [verdict ladder ...]       all, or those in some files

`make mutations` runs it, too. A change that no test sees ends the run with code 1.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.proofs.mutate import main

# file, the line as it stands, the line as it is changed to, tests that must see it
MUTATIONS = [
    ("utils/spans", 'part == "backward" and self.waits', "False", "timeline -k last_gradient"),
    ("utils/spans", "        self.waits = False\n", "", "timeline -k last_gradient"),
    ("utils/spans", "whole if whole and part in STEP_PARTS else part", "part", "timeline -k validation_is"),
    ("utils/spans", "            clock.parts.pop()  #", "            pass  #", "timeline -k error"),
    ("utils/spans", 'r"( in)? \\d+$"', 'r"x$"', "timeline -k inside_another"),
    ("utils/spans", "        tell_of_gradients(model)\n", "        pass\n", "timeline -k 'sends and train.py'"),
    ("utils/measure/time_table", '        self.clock.enter("setup")\n', "", "observers -k short_runs"),
    ("utils/measure/time_table", "            self.is_set_up = True\n", "", "observers -k short_runs"),
    ("utils/measure/time_table", "times[part].index(max(times[part]))", "0", "timeline -k slowest_rank"),
    ("utils/measure/memory_timeline", 'part == "gradients" and not in_buckets', "False", "costs -k memory_by_part"),
    (
        "utils/measure/memory_timeline",
        "            live.pop(address).end",
        "            live[address].end",
        "costs -k 'memory_is_for'",
    ),
    ("utils/measure/memory_timeline", "size < 0 and OTHER in live", "False", "costs -k without_a_word"),
    ("utils/measure/memory_timeline", 'block.part == "temporary" and ', "", "costs -k without_a_word"),
    ("utils/measure/step_profile", "            own[stack[-1]] -= call", "            0 - call", "costs -k is_its_own"),
    ("utils/measure/step_profile", 'end - max(e["ts"], reached)', 'e["dur"]', "costs -k cover"),
    ("utils/measure/step_profile", '"c10d" in event["name"] or', "", "costs -k work_is"),
    ("utils/measure/step_profile", "and not any(lies_in(e, s) for s in spans_of_it)", "", "costs -k work_is"),
    ("utils/measure/step_profile", "max(time - empty_call, 0)", "time", "costs -k work_is"),
    ("utils/measure/step_profile", '"NSYS_PROFILING_SESSION_ID" not in os.environ', "True", "costs -k nsight"),
    ("utils/measure/step_profile", 'startswith("aten::empty")', 'startswith("nothing")', "costs -k operators"),
    (
        "utils/measure/profiles",
        "                dist.barrier()  # no rank",
        "                pass  # no rank",
        "observers -k all_profilers",
    ),
    ("utils/measure/profiles", "if self.steps == last:  #", "if True:  #", "observers -k around"),
    ("utils/measure/profiles", "        self.aside += time", "        0 + time", "observers -k no_training"),
    ("utils/measure/profiles", "or self.steps < self.earliest", "", "observers -k short_runs"),
    (
        "utils/measure/profiles",
        '            with harmless("the profile of a step"):\n                self.profiler.close()\n',
        "",
        "observers -k stops_in",
    ),
    (
        "utils/measure/profiles",
        "            if error is not None:\n                self._record()\n",
        "",
        "timeline -k goes_on",
    ),
    (
        "utils/measure/profiles",
        '                with harmless("the report"):\n                    self.costs.show()',
        "                self.costs.show()",
        "observers -k 'summary_table'",
    ),
    ("utils/measure/costs", "known = set.intersection(", "known = set.union(", "observers -k tell_together"),
    ("utils/measure/costs", "for rank in nodes.values()", "for rank in ranks", "observers -k tell_together"),
    (
        "utils/measure/machine",
        "before.get((name, owner), 0.0 if owner else total)",
        "before.get((name, owner), 0.0)",
        "observers -k readers_that_end",
    ),
    ("utils/measure/machine", "                self.gpu_looks.pop(name, None)\n", "", "observers -k left_out"),
    ("utils/measure/machine", "        self.ended.set()\n", "", "costs -k process_takes"),
    ("utils/measure/verdict", '"communicating": min(waits)', '"communicating": max(waits)', "verdict -k shares"),
    ("utils/measure/verdict", "waits.index(max(waits))", "0", "verdict -k shares"),
    ("utils/measure/verdict", "(self.on_gpu and not self.is_blind)", "False", "verdict -k inside_compiled"),
    ("utils/measure/verdict", "(spoken if self.on_gpu else 0.0)", "0.0", "verdict -k inside_compiled"),
    ("utils/measure/verdict", "step is None or step[0] is None", "step is None", "verdict -k shares"),
    ("utils/measure/verdict", "rank = waits.index(min(waits))", "rank = waits.index(max(waits))", "verdict -k shares"),
    ("utils/measure/advice", "lambda m, c: not c.enable_jit", "lambda m, c: True", "verdict -k what_is_done"),
    ("utils/measure/advice", 'flags + remedy.get("why", "") + ', "flags + ", "verdict -k page_of_symptoms"),
    ("utils/measure/traces", "self.done == self.begin", "False", "costs -k some_steps"),
    ("utils/record/boards", 'if config.tracker == "mlflow":', "if True:", "tracker -k fails"),
    ("utils/record/boards", "goes_on=purge_step is not None", "goes_on=False", "tracker -k in_mlflow"),
    ("utils/record/mlflow_board", "        if step > self.sent[name]:\n", "        if True:\n", "tracker -k in_mlflow"),
    ("utils/record/mlflow_board", "            self.is_lost = True\n", "            pass\n", "tracker -k fails"),
    (
        "benchmarks/ladder_runs",
        "low <= 1 <= high or (error is",
        "low <= 1 <= high or (False and error is",
        "ladder -k noise",
    ),
    (
        "benchmarks/ladder_runs",
        "low <= 1 <= high or",
        "False or",
        "ladder -k noise",
    ),
    ("benchmarks/ladder_runs", "if found != setup:", "if False:", "ladder -k not_mixed"),
    ("utils/files", "        except ValueError:", "        except KeyError:", "ladder -k half_a_line"),
    ("benchmarks/ladder", "if iterations < LEAST:", "if False:", "ladder -k too_few"),
    (
        "benchmarks/ladder",
        "            if (rung.key, number) in runs.done:\n                continue\n",
        "",
        "ladder -k interrupted_goes",
    ),
    (
        "benchmarks/ladder_runs",
        "if under and why_not",
        "if False and why_not",
        "ladder -k noise",
    ),
    ("benchmarks/ladder_runs", "if all(getattr(one", "if any(getattr(one", "ladder -k identical"),
    ("benchmarks/ladder_runs", " / rounds)", ")", "ladder -k identical"),
    ("benchmarks/rungs", "if batch % 2 else", "if False else", "ladder -k stands_on"),
    ("benchmarks/data_parallel", "nn.DataParallel(model, list(range(args.gpus)))", "model", "ladder -k wrapper"),
    ("benchmarks/ladder_runs", 'if "losses" in run]', "]", "ladder -k tried_again"),
    ("benchmarks/call", "        start_new_session=True,\n", "", "ladder -k nothing_is_left"),
    ("benchmarks/call", "            signal.signal(number, lambda", "            (lambda", "ladder -k nothing_is_left"),
    ("benchmarks/call", '"ChildFailedError" not in line', "True", "ladder -k why"),
    ("benchmarks/doctor", "batches = np.resize(order,", "batches = np.resize(order[:1],", "doctor -k counted_once"),
    ("benchmarks/doctor", "min(speeds[1] * depth, speeds[best])", "speeds[1] * depth", "doctor -k too_slow"),
    ("benchmarks/machine", "*Path(ours).parents", "*()", "doctor -k no_more_memory"),
    ("benchmarks/doctor", "seconds > step / 2", "False", "doctor -k too_slow_for_what"),
    ("utils/measure/machine", "if now - moment < 3 * INTERVAL:", "if True:", "observers -k shorter_than"),
    ("benchmarks/doctor", 'most = "dp-cp" if', 'most = "dp-cp" if False and', "doctor -k the_one_group"),
    ("benchmarks/doctor", 'and "dp-cp all_reduce" not in found', "and False", "doctor -k the_one_group"),
    ("benchmarks/call", 'env.pop("SLURM_GPUS", None)', "False", "ladder -k srun_starts"),
    ("benchmarks/call", '"SLURMD_NODENAME" not in os.environ', "False", "ladder -k another_machine"),
    ("benchmarks/ladder", "if rung is rungs[0] and", "if False and", "ladder -k baseline_that"),
    ("benchmarks/ladder", '"skipped" if ".py: error: " in why else "failed"', '"failed"', "ladder -k model_cannot"),
    ("utils/measure/verdict", "if measured.iterations <= 0:", "if False:", "verdict -k one_step"),
    ("utils/measure/verdict", "if activations > others else", "if True else", "verdict -k less_memory"),
    ("utils/run/run", "if isinstance(error, torch.OutOfMemoryError) and", "if False and", "verdict -k who_runs_out"),
    ("utils/measure/machine", "samples[name] = [value]", "pass", "observers -k shorter_than"),
    ("benchmarks/machine", "nproc * threads > len(mine)", "False", "doctor -k numa"),
    ("benchmarks/doctor", "abs(mean) > 1 or not 0.3 < std < 3", "False", "doctor -k do_not_fit"),
    (
        "utils/measure/profiles",
        "                self.settle_all()\n                if self.profiler",
        "                if self.profiler",
        "observers -k under_way",
    ),
    (
        "utils/measure/profiles",
        "                    self.settle_all()\n",
        "                    pass\n",
        "observers -k under_way",
    ),
    ("utils/run/run", "clock.stop(self._aside() - aside)", "clock.stop()", "observers -k no_training"),
]


if __name__ == "__main__":
    sys.exit(main((f"{name}.py", *change) for name, *change in MUTATIONS))
