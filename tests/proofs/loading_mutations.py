"""Do the tests of loading and preparing data see a wrong line? Change one at a time, and run the tests that guard it.

    python tests/proofs/loading_mutations.py [staging archive ...]       all, or those in some files of utils/

`make mutations` runs it, too: about 10 minutes on 2 cores. A change that no test sees ends the run with code 1.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.proofs.mutate import main

SHARING = "parallel.py::test_compressed_frames_are_decoded_once_in_a_group"
# file, the line as it stands, the line as it is changed to, tests that must see it
MUTATIONS = [
    (
        "data/loader",
        "            yield reader.batches[slots[-1]]\n            if len(slots) == in_use:\n"
        "                ahead.release(slots.popleft())\n",
        "            ahead.release(slots[-1])\n            yield reader.batches[slots.popleft()]\n",
        "read_ahead",
    ),
    ("data/loader", "if len(slots) == in_use:", "if len(slots) >= 1:", "dali"),
    ("data/loader", "if self.stream is None or (away if", "if self.stream is None or (0 * away if", "data_loader"),
    ("data/loader", "else away % len(self)):", "else away):", "read_ahead"),
    ("data/loader", "self.stream = None  # it is at its end", "pass", "read_ahead"),
    ("data/loader", "max(1, -(-self.depth // max(requests, 1)))", "1", "read_ahead"),
    ("data/batches", "torch.from_numpy(samples >= 0)", "torch.ones(len(samples))", "data_loader"),
    ("data/batches", "int(t) + part * self.dt", "int(t)", "data_loader"),
    ("data/read_ahead", "if self.error:\n                raise self.error", "pass", "read_ahead"),
    ("data/read_ahead", " and threading.current_thread() not in self.threads", "", "read_ahead"),
    ("data/read_ahead", "self.left[job.slot] -= 1", "self.left[job.slot] = 0", "read_ahead"),
    ("data/read_ahead", "thread.join()", "pass", "read_ahead"),
    ("data/ring", "if length > available():", "if False:", "read_ahead"),
    ("data/read_worker", "signal.signal(getattr(signal, name), signal.SIG_IGN)", "pass", "read_ahead"),
    ("data/read_worker", "str(ROOT), str(child", '".", str(child', "read_ahead"),
    ("data/frames", "        while left:\n            got", "        if left:\n            got", "frame_reader"),
    ("data/frames", "left[0] = left[0][got:]", "pass", "frame_reader"),
    ("data/frames", "+ self.rows.start * row, channels", ", channels", "frame_reader"),
    ("data/frames", 'raise OSError(f"it ends at byte {at:,}")', "break", "frame_reader"),
    ("data/frames", "if stamp(self.files.paths[file]) != self.files.stamps[file]:", "if False:", "frame_reader"),
    ("data/frames", "if size < self.files.stamps[file][0]:", "if False:", "frame_reader"),
    ("data/frames", "access.set_sieve_buf_size(0)", "pass", "frame_reader"),
    ("data/frames", "CHANNELS_AT_ONCE = 500", "CHANNELS_AT_ONCE = 1", "frame_reader"),
    ("data/frames", "os.close(file) if isinstance(file, int) else file[0].file.close()", "pass", "frame_reader"),
    ("data/loader_dali", ", stddev=std, axes", ", axes", "dali"),
    ("data/loader_dali", "how, in_use=QUEUE)", "how, in_use=1)", "dali"),
    ("data/to_device", "if x.shape not in self.casts:", "if True:", "data_loader"),
    ("data/to_device", ".div_(std)", "", "data_loader"),
    ("data/frame_sharing", "batch * index // ranks, batch", "0, batch", SHARING),
    ("data/frame_sharing", "chunk_rows > max(", "chunk_rows < max(", SHARING),
    ("data/staging", "size == size_there and abs(date - date_there) < 2e9", "size == size_there", "staging"),
    ("files", "            part.unlink()\n", "            pass\n", "staging"),
    ("data/staging", "if missing > free:", "if False:", "staging"),
    ("files", "fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait", "str((0 if wait", "staging"),
    ("data/writer", "if t > 0 and not gap:", "if t > 0:", "prepare_data"),
    ("data/writer", "self.differences += t > 0 and not gap", "self.differences += t > 0", "prepare_data"),
    ("data/writer", "            wide = values.double()\n", "            wide = values\n", "prepare_data"),
    ("data/unfinished", "writer.load(self.folder", "(self.folder", "prepare_data"),
    ("data/unfinished", 'missing.update(self.known["missing"])', "pass", "prepare_data"),
    ("data/unfinished", ' and self.known.get("request") == self.request', " and self.known", "prepare_data"),
    ("data/unfinished", 'if all((self.new / f"{name}.h5").exists() for name in known["done"])', "if True", "prepare_data"),
    ("data/unfinished", "request is None or isinstance(error, ValueError)", "True", "prepare_data"),
    ("data/unfinished", "if self.old.exists() and not self.out.exists():", "if False:", "prepare_data"),
    ("data/unfinished", "if held is None:", "if False:", "prepare_data"),
    ("prepare_data/prepare", "bad = ~(np.abs(values) < LARGEST)", "bad = np.isnan(values)", "prepare_data"),
    ("prepare_data/prepare", "self.missing[name] += count", "pass", "prepare_data"),
    ("prepare_data/prepare", "(np.diff(years) != 0) | ", "", "prepare_data"),
    ("prepare_data/archive", "np.roll(values[:, i], -self.rolled, axis=-1) if self.rolled else ", "", "prepare_data"),
    ("prepare_data/archive", "np.diff(times) <= 0", "np.diff(times) < 0", "prepare_data"),
    ("prepare_data/archive", "    if len(odd):", "    if False:", "prepare_data"),
    ("prepare_data/archive", "if len(gaps) and not allow_gaps:", "if False:", "prepare_data"),
    ("prepare_data/archive", "if piece.fixed != first.fixed:", "if False:", "prepare_data"),
    ("prepare_data/archive", "units.setdefault(key, unit) != unit", "units.setdefault(key, unit) and False", "prepare_data"),
    ("prepare_data/archive", "or not np.allclose(values, expected, atol=1e-4)", "", "prepare_data"),
    ("prepare_data/archive_file", "values[:, :, ::-1] if self.latitude[0] < self.latitude[-1] else ", "", "prepare_data"),
    ("prepare_data/archive_file", "0.01 if values.level", "1.0 if values.level", "prepare_data"),
    ("prepare_data/archive_file", 'times = times + values[name]', "values[name]", "prepare_data"),
]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main((f"utils/{name}.py", *change) for name, *change in MUTATIONS))
