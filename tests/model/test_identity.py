"""What tells one base from another: every byte of what is loaded, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from bases import loaded
from messages import refusal
from safetensors.torch import load_file, save_file

from finetune.config import AdapterSection, ModelSection
from finetune.errors import ArtifactError
from finetune.export.gguf import gguf_model
from finetune.model import base as base_module
from finetune.model import build
from finetune.model.adapters import adapter
from finetune.model.source import file_hashes, identity
from finetune.model.structure import streamed


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for what is remembered."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        file_hashes, "_COARSEST_TIMESTAMP_NANOSECONDS", 10**8
    )  # this machine's ticks are of milliseconds
    return file_hashes.memory()


@pytest.fixture
def base(tiny_base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_base, tmp_path / "base"))


def of(base: Path) -> str | None:
    return identity.of_base(ModelSection(name=str(base)))


def write_at(file: Path, place: int, content: bytes) -> None:
    with open(file, "r+b") as opened:
        opened.seek(place)
        opened.write(content)


def age(file: Path) -> None:
    """Wait until a change of the file shows in its times."""
    time.sleep(max(0, file.stat().st_ctime + 0.2 - time.time()))


def shard(base: Path) -> None:
    """The same weights in two files with an index, as large models have them."""
    tensors = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    index = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, base / file, {"format": "pt"})
        index.update(dict.fromkeys(names, file))
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


@pytest.mark.parametrize("sharded", [False, True])
def test_every_byte_of_the_weights_counts(base: Path, sharded: bool) -> None:
    if sharded:
        shard(base)
    seen = {of(base)}
    for file in sorted(base.glob("*.safetensors")):
        size = file.stat().st_size
        for place in (size // 2, size // 3 + 1, size - 1):
            before = file.read_bytes()[place]
            write_at(file, place, bytes([before ^ 1]))
            seen.add(of(base))
            write_at(file, place, bytes([before]))
    assert len(seen) == 1 + 3 * len(list(base.glob("*.safetensors")))
    assert None not in seen


def test_the_config_counts_and_where_images_are_shown_the_processor(base: Path) -> None:
    def identities() -> tuple[str | None, str | None]:
        return of(base), identity.of_base(ModelSection(name=str(base), vision="frozen"))

    before = of(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    seen = [identities()]
    for file in ("preprocessor_config.json", "processor_config.json"):
        for size in (32, 48):
            (base / file).write_text(json.dumps({"size": size}))
            seen.append(identities())
    of_text, of_images = zip(*seen, strict=True)
    assert len({*of_text}) == 1
    assert before not in of_text
    assert len({*of_images}) == len(seen)


def test_neither_times_nor_names_nor_files_that_are_not_loaded_count(base: Path, tmp_path: Path) -> None:
    before = of(base)
    os.utime(base / "model.safetensors", (1, 1))
    (base / "pytorch_model.bin").write_bytes(b"no weights")
    shutil.copy(base / "model.safetensors", base / "consolidated.safetensors")
    (base / "README.md").write_text("x")
    moved = shutil.copytree(base, tmp_path / "moved")
    assert of(base) == of(moved) == before


def test_a_base_in_the_hubs_cache_is_known_by_its_content_and_not_by_its_names(base: Path, tmp_path: Path) -> None:
    """There a weight file is a link to a blob whose name is the hash that it had on the hub."""
    linked = Path(shutil.copytree(base, tmp_path / "linked"))
    blob = tmp_path / ("0" * 64)
    shutil.move(linked / "model.safetensors", blob)
    (linked / "model.safetensors").symlink_to(blob)
    assert of(linked) == of(base)
    write_at(blob, blob.stat().st_size // 2, b"\1\2\3\4")
    assert of(linked) != of(base)


def test_random_weights_and_unavailable_bases_have_no_identity(base: Path) -> None:
    assert identity.of_base(ModelSection(weights="random")) is None
    assert identity.of_base(ModelSection(name="someone/nothing")) is None
    shard(base)
    next(base.glob("*-00002-of-*")).unlink()
    assert of(base) is None


@pytest.mark.parametrize("form", ["one file", "shards", "named in the config"])
def test_what_is_hashed_is_what_is_loaded(form: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "shards":
        shard(base)
    elif form == "named in the config":
        (base / "model.safetensors").rename(base / "other.safetensors")
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
    loaded: list[Path] = []
    check = base_module.weight_files.check
    monkeypatch.setattr(base_module.weight_files, "check", lambda file: (loaded.append(file), check(file)))
    base_module.from_safetensors(str(base))
    assert sorted(loaded) == identity.loaded_files(base)
    assert loaded


def test_other_files_beside_the_loaded_ones_are_not_read_for_the_base(base: Path) -> None:
    """Mistral's `consolidated.safetensors` is one; here it has other values, types and NaN."""
    section = ModelSection(name=str(base))

    def start() -> dict[str, torch.Tensor]:
        model = loaded("nf4", base, attention="eager")
        torch.manual_seed(0)
        adapted = adapter.attach(model, AdapterSection(rank=4, init="loftq", targets=["q_proj"]), section.name, seed=1)
        return {name: weight.detach() for name, weight in adapted.named_parameters() if "lora_" in name}

    stored, before = gguf_model.stored_type(base), start()
    others = {name: weight.double() * 3 for name, weight in load_file(base / "model.safetensors").items()}
    others["model.norm.weight"][0] = torch.nan
    save_file(others, base / "zz.safetensors")
    base_module.refuse_not_finite(section)
    assert gguf_model.stored_type(base) == stored
    after = start()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def test_of_a_tensor_in_two_shards_the_last_counts_as_in_transformers(base: Path) -> None:
    """Both when it is trained and when it is merged, which writes it once."""
    shard(base)
    name = "model.norm.weight"
    for file, value in (("model-00001-of-00002", torch.ones(7)), ("model-00002-of-00002", torch.ones(192) * 5)):
        file_ = base / f"{file}.safetensors"
        save_file({**load_file(file_), name: value}, file_, {"format": "pt"})
    loaded = base_module.from_safetensors(str(base)).get_parameter(name)
    files = identity.files_to_load(base)
    weights = streamed.Weights(build.weightless(ModelSection(name=str(base))), files)
    weights.check_tensors()
    assert loaded.tolist() == weights[name].tolist() == [5] * 192
    assert [name in weights.layout_of(file) for file in files] == [False, True]


def test_files_that_transformers_takes_for_a_checkpoint_of_ranks_are_never_loaded(base: Path) -> None:
    """It would read every file of the folder, and the identity be that of model.safetensors alone."""
    save_file(load_file(base / "model.safetensors"), base / "shard-00000-model-00001-of-00001.safetensors")
    assert identity.loaded_files(base) == []
    for load in (lambda: base_module.from_safetensors(str(base)), lambda: identity.files_to_load(base)):
        with refusal(ArtifactError, "shard-00000-model-00001-of-00001.safetensors"):
            load()


# -- what is remembered ------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file whose hash was remembered, and is wrong in what is remembered: whoever trusts that shows it."""
    file = tmp_path / "weights"
    file.write_bytes(b"some weights")
    age(file)
    file_hashes.sha256(file)
    memory = file_hashes.memory()
    assert memory.stat().st_mode & 0o777 == 0o600, "private to its user"
    assert [found.name for found in memory.parent.iterdir()] == [memory.name], "and nothing else is left there"
    entries = json.loads(memory.read_text())
    entries[os.path.realpath(file)]["sha256"] = "remembered"
    memory.write_text(json.dumps(entries))
    assert file_hashes.sha256(file) == "remembered"
    return file


@pytest.mark.parametrize("spoil", ["written", "times set back", "replaced"])
def test_a_file_that_changed_is_read_again(spoil: str, file: Path) -> None:
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    if spoil == "replaced":
        other = file.with_name("other")
        other.write_bytes(b"SOME WEIGHTS")
        os.replace(other, file)
    else:
        file.write_bytes(b"SOME WEIGHTS")
    if spoil != "written":
        os.utime(file, ns=times)
    assert file_hashes.sha256(file) != "remembered"


def test_a_file_that_may_change_within_the_same_tick_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hashes, "_COARSEST_TIMESTAMP_NANOSECONDS", 3600 * 10**9)
    (tmp_path / "weights").write_bytes(b"some weights")
    file_hashes.sha256(tmp_path / "weights")
    assert not file_hashes.known(tmp_path / "weights")


@pytest.mark.parametrize("spoil", ["others may write it", "its group may write it", "another's", "a link", "damaged"])
def test_hashes_that_another_user_could_have_written_are_not_trusted(spoil: str, file: Path, memory: Path) -> None:
    if spoil == "another's":
        if os.geteuid():
            pytest.skip("only root can give a file away")
        os.chown(memory, 65534, 65534)
    elif spoil == "a link":
        memory.rename(memory.with_name("elsewhere"))
        memory.symlink_to(memory.with_name("elsewhere"))
    elif spoil == "damaged":
        memory.write_text("[" * 100_000)
    else:
        memory.chmod(0o602 if spoil.startswith("others") else 0o620)
    assert file_hashes.sha256(file) != "remembered"
    assert file_hashes.sha256(file) != "remembered"


def test_a_cache_folder_that_cannot_be_written_only_costs_time(tmp_path: Path, memory: Path) -> None:
    memory.parent.parent.write_text("a file where the folder should be")
    (tmp_path / "weights").write_bytes(b"some weights")
    age(tmp_path / "weights")
    assert file_hashes.sha256(tmp_path / "weights") == file_hashes.sha256(tmp_path / "weights")


def test_a_folder_that_others_may_write_to_is_neither_read_nor_written(
    file: Path, memory: Path, tmp_path: Path
) -> None:
    memory.parent.chmod(0o777)
    assert file_hashes.sha256(file) != "remembered"
    kept = memory.read_text()
    (tmp_path / "more").write_bytes(b"more weights")
    age(tmp_path / "more")
    file_hashes.sha256(tmp_path / "more")
    assert memory.read_text() == kept
