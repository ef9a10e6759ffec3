"""Ranks that do not train the same job, and ranks that are lost: each ends all of them, named, and none waits."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from children import IMPATIENT, Fault
from jobs import sampled
from messages import refusal
from rank_jobs import FSDP, PLAIN, UNEVALUATED, Jobs, resumed_at
from safetensors.torch import load_file, save_file
from together import assert_all, assert_refused

from finetune.errors import DataError, MachineError
from finetune.recipe import provenance
from finetune.runtime import rank_watch
from finetune.runtime import ranks as processes

STEP = "finetune.training.step:Step.clip"
JOB = [PLAIN, *UNEVALUATED, "training.batch_size=6", "training.micro_batch=1", "output.save_every=2"]


# -- other jobs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def others(rows_file: Path, shallow_base: Path, tmp_path: Path) -> dict[str, list[str]]:
    """Overrides of the rank with another job, or with another place of the same."""
    *before, last = rows_file.read_text().splitlines(keepends=True)
    turns = json.loads(last)["messages"]
    turns[-1]["content"] += " other"
    (tmp_path / "rows.jsonl").write_text("".join(before) + json.dumps({"messages": turns}) + "\n")
    shutil.copy(rows_file, tmp_path / "copy.jsonl")
    for name in ("same", "base"):
        shutil.copytree(shallow_base, tmp_path / name)
    file = tmp_path / "base" / "model.safetensors"
    save_file({name: tensor * 1.01 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return {
        "config": ["training.learning_rate=0.01", "output.save_every=3"],
        "template": ["data.chat_template=llama3"],
        "last row": [f"data.train={tmp_path / 'rows.jsonl'}"],
        "base": [f"model.name={tmp_path / 'base'}", f"model.tokenizer={shallow_base}"],
        "copies": [f"data.train={tmp_path / 'copy.jsonl'}", f"model.name={tmp_path / 'same'}"],
        "no file": ["data.train=nowhere.jsonl"],
        "no key": ["training.no_such_key=1"],
        "odd batch": ["training.batch_size=5"],
    }


@pytest.mark.parametrize(
    ("other", "code", "said"),
    [
        ("config", 2, ["rank 1", "`training.learning_rate` is 0.01 (rank 0: 0.003)", "`output.save_every` is 3"]),
        pytest.param("template", 2, ["rank 1", "`data.chat_template`"], marks=pytest.mark.long),
        ("last row", 3, ["rank 1", "`data.train`"]),
        ("base", 7, ["rank 1", "`model.name`"]),
        # Before the ranks are connected:
        pytest.param("no file", 3, ["rank 1: nowhere.jsonl: no such file"], marks=pytest.mark.long),
        ("no key", 2, ["rank 1: override `training.no_such_key=1`: unknown key"]),
        pytest.param(
            "odd batch",
            2,
            ["rank 1: `training.batch_size` 5 cannot be split among 2 processes"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_rank_with_another_job_ends_all_with_one_message_that_names_it(
    jobs: Jobs, others: dict[str, list[str]], other: str, code: int, said: list[str]
) -> None:
    together = jobs(*JOB, "training.learning_rate=0.003")
    assert_refused(together.go(2, own={1: others[other]}), code, *said)
    assert not together.run.saved_steps
    assert not together.run.metrics()


def test_a_batch_that_the_ranks_cannot_share_is_refused_once(jobs: Jobs) -> None:
    ended = jobs(*JOB, "training.batch_size=5").go(2)
    assert_refused(ended, 2, "error: `training.batch_size` 5 cannot be split among 2 processes")


def test_copies_of_the_same_files_are_the_same_job_and_a_ranks_last_words_name_a_directory_that_is_there(
    jobs: Jobs, others: dict[str, list[str]], shallow_base: Path
) -> None:
    together = jobs(*JOB)
    ended = together.go(2, dict.fromkeys((0, 1), Fault(STEP, nth=3, action="SIGTERM")), own={1: others["copies"]})
    assert_all(ended, 143)
    for each in ended:
        assert f"step 3 is saved in {together.run.checkpoints}." in each.in_one_line
    assert together.run.config().model.name == str(shallow_base)


def test_another_version_of_a_library_is_named_with_both_versions() -> None:
    ranks = [{"packages": {"torch": version}} for version in ("2.13.0", "2.13.0", "2.12.1")]
    with refusal(MachineError, "2.12.1", "2.13.0"):
        provenance._refuse_other_ranks(ranks)


def test_a_rank_that_never_starts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    launchers = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = {"TORCHELASTIC_USE_AGENT_STORE": True, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": launchers.port}
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, **torchrun}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(processes, "_START", timedelta(seconds=2))
    with refusal(MachineError, "have not started"), processes.together(torch.device("cpu")):
        pass


def test_ranks_that_start_again_ignore_what_earlier_attempts_left_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if one starts before rank 0 does, which then finds the question of the earlier attempt's rank 2."""
    store = torch.distributed.HashStore()
    this = threading.local()
    monkeypatch.setattr(processes, "rank", lambda: this.rank)
    monkeypatch.setenv("WORLD_SIZE", "3")

    def start(rank: int, said: str) -> tuple[str, list[str]]:
        this.rank = rank
        time.sleep({0: 0.2, 1: 0, 2: 0.4}[rank])
        return processes._exchanged(store, said)

    names = set()
    for attempt in ("first", "second"):
        said = [f"{attempt} {rank}" for rank in range(3)]
        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(start, range(3), said))
        assert [heard for _, heard in answers] == [said] * 3
        [name] = {name for name, _ in answers}
        names.add(name)
    assert len(names) == 2


# -- lost ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "killed"), sampled([(2, 0), (3, 1)], (3, 1)))
def test_a_killed_rank_ends_the_others_naming_it_and_a_resume_goes_on(jobs: Jobs, ranks: int, killed: int) -> None:
    together = jobs(*JOB, "training.max_steps=3")
    ended = together.go(ranks, {killed: Fault(STEP, nth=3, once=str(together.run.checkpoint(2)))})
    assert ended.pop(killed).code == -signal.SIGKILL
    assert_all(ended, 4)
    for each in ended:
        assert f"rank {killed} was killed" in each.in_one_line
        assert "Traceback" not in each.output
    assert_all(together.go(ranks), 0)
    assert resumed_at(together.run) == [2]


def test_a_rank_killed_in_a_probe_of_a_sharded_model_is_named_and_the_model_is_not_blamed(jobs: Jobs) -> None:
    """The other rank's pass fails as it gathers weights, with an error of gloo."""
    together = jobs(*JOB, FSDP, "training.max_steps=1")
    survivor, killed = together.go(2, {1: Fault("finetune.model.probes.causality:prove")})
    assert killed.code == -signal.SIGKILL
    assert survivor.code == 4, survivor.output
    assert "rank 1 was killed" in survivor.in_one_line
    assert "with this configuration" not in survivor.in_one_line


@pytest.mark.parametrize("stopped", sampled([0, 1], 0))
def test_a_rank_that_is_stopped_or_hangs_while_it_beats_ends_all_naming_it(jobs: Jobs, stopped: int) -> None:
    """A stopped one says so too, once it is continued; the watch of one that hangs goes on in a thread of its own."""
    hangs = {1: Fault("finetune.training.step:Step.micro_step", nth=6, action="hang")}
    stops = {stopped: Fault(STEP, nth=2, action="SIGSTOP")}
    hanging, children = (jobs(*JOB).start(3, faults, environment={IMPATIENT: "1"}) for faults in (hangs, stops))
    held = children.pop(stopped)
    held.wait_until_stopped()
    ended = [child.wait() for child in children]
    held.send(signal.SIGCONT)
    ended.append(held.wait())
    assert_all(ended, 4)
    assert all(f"rank {stopped} has been silent for" in each.in_one_line for each in ended)
    ended = [child.wait() for child in hanging]
    assert_all(ended, 4)
    assert all("rank 1 hangs: the others have waited for it" in each.in_one_line for each in ended)


def test_a_rank_that_is_silent_is_lost_within_a_minute() -> None:
    assert rank_watch.SILENCE_SECONDS + rank_watch.GRACE_SECONDS + 2 * rank_watch.BEAT_SECONDS < 60


# -- the watch by itself ---------------------------------------------------------------------------------------------


LONG = 600.0  # seconds, which pass only where something is wrong


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch):
    """Watches of three ranks in one process. Ended by themselves, none ends the process."""
    monkeypatch.setattr(rank_watch, "BEAT_SECONDS", 0.02)
    for limit in ("SILENCE_SECONDS", "GRACE_SECONDS", "_CLOSE_SECONDS"):
        monkeypatch.setattr(rank_watch, limit, LONG)
    made: dict[int, rank_watch.Watch] = {}
    server = rank_watch.host()
    port = server.getsockname()[1]

    def connect(rank: int) -> None:
        made[rank] = rank_watch.connect(("localhost", port), "token", rank)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    with server:
        made[0] = rank_watch.accept(server, "token", 2)
    for thread in threads:
        thread.join()
    yield made
    monkeypatch.setattr(rank_watch, "_CLOSE_SECONDS", 0.01)
    for one in made.values():
        one.leave()


def test_ranks_that_are_done_are_not_lost(watches: dict[int, rank_watch.Watch]) -> None:
    watches[1].leave()  # returns once rank 0 has heard of it
    assert watches[0].lost(0.2) is None
    watches[0].leave()
    assert watches[2].lost(0.2) is None


def test_a_loss_comes_to_all_with_its_reason(watches: dict[int, rank_watch.Watch]) -> None:
    failure = rank_watch.Lost(1, "ended: no such file")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(watches[1].leave, failure)  # which waits for rank 0 to leave
        assert watches[0].lost(LONG) == failure
        assert watches[2].lost(LONG) == failure
        rank_watch._CLOSE_SECONDS = 0.01
        watches[0].leave()


@pytest.mark.parametrize("hanging", [0, 1])
def test_a_rank_that_stays_behind_the_others_hangs(
    watches: dict[int, rank_watch.Watch], monkeypatch: pytest.MonkeyPatch, hanging: int
) -> None:
    others = {0, 1, 2} - {hanging}
    for rank in others:
        watches[rank].passed += 1
    while any(watches[0]._peers[rank].passed == 0 for rank in others - {0}):
        time.sleep(0.02)
    monkeypatch.setattr(rank_watch, "BEHIND_SECONDS", 0.3)
    monkeypatch.setattr(rank_watch, "MAIN_BEHIND_SECONDS", 0.3)
    for rank in range(3):
        lost = watches[rank].lost(LONG)
        assert lost is not None
        assert lost.rank == hanging
        assert "hangs" in lost.why


def test_ranks_that_wait_at_the_same_sync_point_do_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does one that is behind but passes further sync points."""
    monkeypatch.setattr(rank_watch, "BEAT_SECONDS", LONG)  # it looks at the others only here
    watch, behind, almost = rank_watch.Watch(0, {}), SimpleNamespace(passed=0), 0.9 * rank_watch.BEHIND_SECONDS
    watch._peers = {1: behind, 2: SimpleNamespace(passed=20)}
    watch.passed = 20
    while behind.passed < 20:
        behind.passed += 2
        assert [watch._hanging(almost) for _ in range(2)] == [None] * 2
    assert [watch._hanging(almost) for _ in range(9)] == [None] * 9
    behind.passed = 18
    assert [watch._hanging(almost) is None for _ in range(3)] == [True, True, False]
    watch._peers.clear()
    watch.leave()


def test_the_other_ranks_notice_that_rank_0_is_silent(
    watches: dict[int, rank_watch.Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watches[0]._peers[1], "say", lambda **message: None)
    monkeypatch.setattr(rank_watch, "SILENCE_SECONDS", 0.5)
    lost = watches[1].lost(LONG)
    assert lost is not None
    assert lost.rank == 0
    assert "has been silent" in lost.why


def test_a_connection_without_the_token_is_not_accepted_as_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "_CONNECT_SECONDS", 0.5)
    with rank_watch.host() as server:
        address = ("localhost", server.getsockname()[1])
        with socket.create_connection(address) as stranger:
            stranger.sendall(b'{"token": "guessed", "rank": 1}\n')
            with refusal(MachineError, "ranks [1]"):
                rank_watch.accept(server, "token", 1)


def test_only_errors_of_torch_are_taken_for_those_of_a_collective() -> None:
    """The path of a file may contain the name of gloo."""

    class Asked(Exception):
        pass

    class Watched:
        def lost(self, seconds: float) -> None:
            raise Asked

    assert processes._lost_rank(Watched(), DataError("/data/gloo.jsonl:1: no row")) is None
    with pytest.raises(Asked):
        processes._lost_rank(Watched(), RuntimeError("[gloo/transport] Connection closed by peer"))
