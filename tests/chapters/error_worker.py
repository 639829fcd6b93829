"""One rank that runs train.py on a list of command lines, one after another, in one process (imports cost seconds).

`error_worker.py CASES.json RESULTS`: each case is a command line; RESULTS<rank> gets its exit code, message and time.
"""

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path

import train
from utils.ranks.start import start

cases, path = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2] + os.environ["RANK"])
sys.argv = ["train.py"]
port, results = int(os.environ["MASTER_PORT"]), []
for i, argv in enumerate(cases):
    os.environ["MASTER_PORT"] = str(port + i)
    begin, output = time.perf_counter(), io.StringIO()
    with contextlib.redirect_stderr(output):
        try:
            start(train.main, argv)
            code = 0
        except SystemExit as end:
            code = end.code
    results.append({"code": code, "message": output.getvalue(), "seconds": time.perf_counter() - begin})
path.write_text(json.dumps(results))
