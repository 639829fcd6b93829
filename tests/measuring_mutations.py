"""Do the tests of reports, traces, the ladder and the doctor see a wrong line? Change one at a time.

    python tests/measuring_mutations.py [verdict ladder ...]       all, or those in some files

`make mutations` runs it, too. A change that no test sees ends the run with code 1.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.mutate import main

# file, the line as it stands, the line as it is changed to, tests that must see it
MUTATIONS = [
    ("utils/timeline", 'part == "backward" and self.waits', "False", "timeline -k last_gradient"),
    ("utils/timeline", "        self.waits = False\n", "", "timeline -k last_gradient"),
    ("utils/timeline", "whole if whole and part in STEP_PARTS else part", "part", "timeline -k validation_is"),
    ("utils/timeline", "            clock.parts.pop()  #", "            pass  #", "timeline -k error"),
    ("utils/timeline", 'r"( in)? \\d+$"', 'r"x$"', "timeline -k inside_another"),
    ("utils/timeline", "        tell_of_gradients(model)\n", "        pass\n", "timeline -k 'sends and train.py'"),
    ("utils/time_report", '        self.clock.enter("setup")\n', "", "observers -k short_runs"),
    ("utils/time_report", "            self.is_set_up = True\n", "", "observers -k short_runs"),
    ("utils/time_report", "times[part].index(max(times[part]))", "0", "timeline -k slowest_rank"),
    ("utils/step_profile", 'part == "gradients" and not in_buckets', "False", "costs -k memory_by_part"),
    (
        "utils/step_profile",
        "            live.pop(address).end",
        "            live[address].end",
        "costs -k 'memory_is_for'",
    ),
    ("utils/step_profile", "size < 0 and OTHER in live", "False", "costs -k without_a_word"),
    ("utils/step_profile", 'block.part == "temporary" and ', "", "costs -k without_a_word"),
    ("utils/step_profile", "            own[stack[-1]] -= call", "            0 - call", "costs -k is_its_own"),
    ("utils/step_profile", 'end - max(e["ts"], reached)', 'e["dur"]', "costs -k cover"),
    ("utils/step_profile", '"c10d" in event["name"] or', "", "costs -k work_is"),
    ("utils/step_profile", "and not any(lies_in(e, s) for s in spans_of_it)", "", "costs -k work_is"),
    ("utils/step_profile", "max(time - empty_call, 0)", "time", "costs -k work_is"),
    ("utils/step_profile", '"NSYS_PROFILING_SESSION_ID" not in os.environ', "True", "costs -k nsight"),
    ("utils/step_profile", 'startswith("aten::empty")', 'startswith("nothing")', "costs -k operators"),
    (
        "utils/profiles",
        "                dist.barrier()  # no rank",
        "                pass  # no rank",
        "observers -k all_profilers",
    ),
    ("utils/profiles", "if self.steps == last:  #", "if True:  #", "observers -k around"),
    ("utils/profiles", "        self.aside += time", "        0 + time", "observers -k no_training"),
    ("utils/profiles", "or self.steps < self.earliest", "", "observers -k short_runs"),
    (
        "utils/profiles",
        '            with harmless("the profile of a step"):\n                self.profiler.close()\n',
        "",
        "observers -k stops_in",
    ),
    (
        "utils/profiles",
        "            if error is not None:\n                self._record()\n",
        "",
        "timeline -k goes_on",
    ),
    (
        "utils/profiles",
        '                with harmless("the report"):\n                    self.costs.show()',
        "                self.costs.show()",
        "observers -k 'summary_table'",
    ),
    ("utils/run_costs", "known = set.intersection(", "known = set.union(", "observers -k tell_together"),
    ("utils/run_costs", "for rank in nodes.values()", "for rank in ranks", "observers -k tell_together"),
    (
        "utils/system_watch",
        "before.get((name, owner), 0.0 if owner else total)",
        "before.get((name, owner), 0.0)",
        "observers -k readers_that_end",
    ),
    ("utils/system_watch", "                self.gpu_looks.pop(name, None)\n", "", "observers -k left_out"),
    ("utils/system_watch", "        self.ended.set()\n", "", "costs -k process_takes"),
    ("utils/verdict", '"communicating": min(waits)', '"communicating": max(waits)', "verdict -k shares"),
    ("utils/verdict", "waits.index(max(waits))", "0", "verdict -k shares"),
    ("utils/verdict", "(self.on_gpu and not self.is_blind)", "False", "verdict -k inside_compiled"),
    ("utils/verdict", "(spoken if self.on_gpu else 0.0)", "0.0", "verdict -k inside_compiled"),
    ("utils/verdict", "step is None or step[0] is None", "step is None", "verdict -k shares"),
    ("utils/verdict", "rank = waits.index(min(waits))", "rank = waits.index(max(waits))", "verdict -k shares"),
    ("utils/advice", "lambda m, c: not c.enable_jit", "always", "verdict -k what_is_done"),
    ("utils/advice", " + self.why + self.more", " + self.more", "verdict -k page_of_symptoms"),
    ("utils/torch_profile", "self.done == self.begin", "False", "costs -k some_steps"),
    ("utils/curves", 'if config.tracker == "mlflow":', "if True:", "tracker -k fails"),
    ("utils/curves", "goes_on=purge_step is not None", "goes_on=False", "tracker -k in_mlflow"),
    ("utils/tracker", "        if step > self.sent[name]:\n", "        if True:\n", "tracker -k in_mlflow"),
    ("utils/tracker", "            self.is_lost = True\n", "            pass\n", "tracker -k fails"),
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
    ("utils/system_watch", "if now - moment < 3 * INTERVAL:", "if True:", "observers -k shorter_than"),
    ("benchmarks/doctor", 'most = "dp-cp" if', 'most = "dp-cp" if False and', "doctor -k the_one_group"),
    ("benchmarks/doctor", 'and "dp-cp all_reduce" not in found', "and False", "doctor -k the_one_group"),
    ("benchmarks/call", 'env.pop("SLURM_GPUS", None)', "False", "ladder -k srun_starts"),
    ("benchmarks/call", '"SLURMD_NODENAME" not in os.environ', "False", "ladder -k another_machine"),
    ("benchmarks/ladder", "if rung is rungs[0] and", "if False and", "ladder -k baseline_that"),
    ("benchmarks/ladder", '"skipped" if ".py: error: " in why else "failed"', '"failed"', "ladder -k model_cannot"),
    ("utils/verdict", "if measured.iterations <= 0:", "if False:", "verdict -k one_step"),
    ("utils/verdict", "if activations > others else", "if True else", "verdict -k less_memory"),
    ("utils/run", "if isinstance(error, torch.OutOfMemoryError) and", "if False and", "verdict -k who_runs_out"),
    ("utils/system_watch", "samples[name] = [value]", "pass", "observers -k shorter_than"),
    ("benchmarks/machine", "nproc * threads > len(mine)", "False", "doctor -k numa"),
    ("benchmarks/doctor", "abs(mean) > 1 or not 0.3 < std < 3", "False", "doctor -k do_not_fit"),
    (
        "utils/profiles",
        "                self.settle_all()\n                if self.profiler",
        "                if self.profiler",
        "observers -k under_way",
    ),
    (
        "utils/profiles",
        "                    self.settle_all()\n",
        "                    pass\n",
        "observers -k under_way",
    ),
    ("utils/run", "clock.stop(self._aside() - aside)", "clock.stop()", "observers -k no_training"),
]


if __name__ == "__main__":
    sys.exit(main((f"{name}.py", *change) for name, *change in MUTATIONS))
