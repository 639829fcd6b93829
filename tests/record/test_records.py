"""metrics.jsonl: damage is found and named, and half a line that a kill left is none. Pictures are whole."""

import errno
import io
import json
import logging
import threading

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers import losses, run_folder, run_here, tiny_flags
from utils.config.settings import Config
from utils.files import cut_records, read_events, to_line
from utils.record import boards, run_logger

EVENTS = [{"event": "step", "iteration": i, "loss": 0.1 * i, "note": 'a "crc32": {x}'} for i in range(1, 6)]


@pytest.mark.parametrize("count", [5, 1])
def test_every_flipped_bit_is_found_and_named(tmp_path, caplog, count):
    """Also in the checksum of a single line, and in the last newline: that line is no half one."""
    path = tmp_path / "metrics.jsonl"
    content = "".join(map(to_line, EVENTS[:count])).encode()
    lines = content.splitlines(keepends=True)
    for i in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[i // 8] ^= 1 << i % 8
        path.write_bytes(damaged)
        caplog.clear()
        found = read_events(path)
        hit = next(n for n in range(len(lines)) if i // 8 < sum(map(len, lines[: n + 1])))
        named = f"line {hit + 1} is damaged, and left out"
        assert named in caplog.text, (i, bytes(damaged))
        assert all(event in EVENTS for event in found) and len(found) >= count - 2


def test_very_many_damaged_lines_are_counted(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text("x\n" * 1000)
    assert read_events(tmp_path / "metrics.jsonl") == []
    assert len(caplog.messages) == 11 and "so are 990 more lines" in caplog.messages[-1]


def test_half_a_line_of_a_process_that_was_killed(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    text = "".join(map(to_line, EVENTS))
    for cut in range(1, len(to_line(EVENTS[-1]))):
        path.write_text(text[:-cut])
        assert read_events(path) == EVENTS[: 4 + (cut == 1)] and not caplog.text


def test_lines_without_a_checksum_are_read(tmp_path, caplog):
    """Those of version 0.1.0; a run that goes on gives them one."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    assert read_events(path) == EVENTS
    cut_records(path, 3, 0)
    assert path.read_text() == "".join(map(to_line, EVENTS[:3])) and not caplog.text


def test_a_run_that_goes_on_names_what_is_damaged(tiny, caplog):
    argv = tiny_flags(tiny, "--num_iters=4", "--checkpoint_every=2", "--keep_checkpoints=9")
    folder = run_here(argv)
    whole = losses(folder)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"iteration": 1,', '"iteration": 9,', 1))
    with caplog.at_level(logging.WARNING):
        run_here([*argv, "--resume", str(folder / "checkpoints/00000002-validated")])
    assert "metrics.jsonl: line 1 is damaged, and left out" in (run_folder(argv) / "out.log").read_text()
    assert losses(folder) == whole[1:]


def test_a_picture_is_there_whole_or_not_at_all(tiny, monkeypatch, capsys):
    """Where the disk is full the one before stays, and training goes on."""
    original, written = boards.imsave, []

    def half(path, *args, **options):
        original(path, *args, **options)
        written.append(path.read_bytes())
        if len(written) == 2:
            path.write_bytes(written[1][: len(written[1]) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(boards, "imsave", half)
    folder = run_here(tiny_flags(tiny, "--num_iters=4", "--plot_channels=ch0", "--checkpoint_every=None"))
    (picture,) = (folder / "pictures").iterdir()
    assert len(written) == len(set(written)) == 2 and picture.read_bytes() == written[0]
    assert "Pictures are not written" in capsys.readouterr().err and len(losses(folder)) == 4
    assert len(list((folder / "logs").iterdir())) == 1  # for the curves nothing happened


def test_a_point_that_comes_while_the_board_is_opened_anew(tmp_path, monkeypatch):
    """The thread that saves opens it, and the one that trains adds to it: none goes to the board that is gone."""
    opens, goes_on = threading.Event(), threading.Event()

    class Slow(boards.SummaryWriter):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            opens.set()
            goes_on.wait(0.5)

    curves = boards.Curves(tmp_path, Config(), None)
    curves.scalars({"x": 1.0}, 1)
    with curves.if_there_is_room("Curves"):
        raise OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(boards, "SummaryWriter", Slow)
    saving = threading.Thread(target=curves.sync)
    saving.start()
    opens.wait()
    curves.scalars({"x": 2.0}, 2)
    goes_on.set()
    saving.join()
    curves.sync()
    curves.close("FINISHED")
    found = EventAccumulator(str(tmp_path / "logs"))
    found.Reload()
    assert [event.step for event in found.Scalars("x")] == [1, 2]


class Lost(io.BytesIO):
    """A file of a network file system, which tells at its end what it lost."""

    name = "metrics.jsonl"

    def close(self):
        super().close()
        raise OSError(errno.EIO, "Input/output error")


def test_records_that_cannot_be_closed_end_no_run(caplog):
    records = Lost()
    run_logger._close_records(records, b"{}\n")
    assert records.closed and "metrics.jsonl: its last lines may be lost ([Errno 5] Input" in caplog.text
