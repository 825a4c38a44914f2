"""Models of the Hugging Face hub, in a cache that is written by hand. Nothing reaches the network."""

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects

from ksana_jax import LLM
from ksana_jax.core.errors import LoadError
from ksana_jax.core.sources import commit_of, model_path
from ksana_jax.core.sources.hub import HubName
from ksana_jax.core.sources.resolve import adapter_path
from ksana_jax.loading import load_config, load_model
from ksana_jax.loading.digest import digest_of_files
from ksana_jax.tokenizers import load_tokenizer
from tests.core.sources.hub_cache import COMMIT, LATER, model_files, write_snapshot
from tests.loading.models_on_disk import TINY, random_tensors, write_model, write_shards

REPO = "someone/some-model"
TOKENIZER = {"tokenizer.json": b"{}"}


@pytest.fixture
def files(tmp_path):
    return model_files(write_model(tmp_path / "model", random_tensors(TINY))) | TOKENIZER


@pytest.fixture
def shards(tmp_path):
    return model_files(write_shards(tmp_path / "sharded", random_tensors(TINY))) | TOKENIZER


@pytest.fixture
def hub(monkeypatch):
    """Makes calls of snapshot_download that may use the network raise an error, or return what `answer` does."""
    asked, original = [], huggingface_hub.snapshot_download

    def answer_with(answer, listed=()):
        def snapshot_download(repo, *, revision, allow_patterns, **options):
            if options["local_files_only"]:
                return original(repo, revision=revision, allow_patterns=allow_patterns, **options)
            asked.append((revision, list(allow_patterns)))
            if isinstance(answer, BaseException):
                raise answer
            return answer(revision, allow_patterns)

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repo, revision: [*listed])
        return asked

    return answer_with


def refusal(name, **options) -> str:
    with pytest.raises(LoadError) as caught:
        model_path(name, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    return message


def response(status: int) -> httpx2.Response:
    return httpx2.Response(status, request=httpx2.Request("GET", "https://hub.invalid/api"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("org/name", ("org/name", None, None)),
        ("org/name-2.5_x", ("org/name-2.5_x", None, None)),
        ("org/name@v1.0", ("org/name", "v1.0", None)),
        ("org/name@refs/pr/3", ("org/name", "refs/pr/3", None)),
        ("org/name@feature/x", ("org/name", "feature/x", None)),
        ("org/name/model-Q4_0.gguf", ("org/name", None, "model-Q4_0.gguf")),
        ("org/name@v1/model-Q4_0.gguf", ("org/name", "v1", "model-Q4_0.gguf")),
        ("org/name@refs/pr/3/BF16/model.gguf", ("org/name", "refs/pr/3", "BF16/model.gguf")),
        ("org/name/UD Q4/a (1).gguf", ("org/name", None, "UD Q4/a (1).gguf")),
    ],
)
def test_a_name_is_a_repository_a_revision_and_a_file(text, parts):
    name = HubName.parse(text)
    assert (name.repo, name.revision, name.file) == parts and str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "name", "/org/name", "./org/name", "../name", "org/..", "~/name", "a/b/c", "org/name@", "org/name/"),
        *("org/name@..", "org/name@../x", "org/name@a/../b", "org/name@/etc", "org/name@.hidden", "org/name@a b"),
        *("org/name/../x.gguf", "org/name//x.gguf", "org/name/a/../../x.gguf", "org/name/.gguf", "org/name/x\0.gguf"),
        *("org/name/a\\..\\x.gguf", "org/x.gguf", "org/name\n", "org/name@v1\n", "org/name/x.bin", "org/name@v1@v2"),
    ],
)
def test_what_has_another_form_or_would_leave_the_cache_is_no_name(text):
    assert HubName.parse(text) is None


def test_a_complete_copy_is_used_without_the_network(cache, files, hub, caplog):
    snapshot = write_snapshot(cache, REPO, files)
    asked = hub(AssertionError("the hub is not asked"))
    with caplog.at_level(logging.INFO, "ksana_jax"):
        assert model_path(REPO) == model_path(f"{REPO}@main") == snapshot and asked == []
    assert f"{REPO} is commit {COMMIT} of the hub" in caplog.text
    config, params = load_model(REPO)
    expected = random_tensors(TINY)["model.embed_tokens.weight"]
    assert config == TINY and (params.embed == expected).all()
    assert commit_of(snapshot) == commit_of(snapshot / "config.json") == COMMIT and commit_of(cache) is None


def test_a_revision_is_a_branch_a_tag_or_a_commit(cache, files):
    first = write_snapshot(cache, REPO, files)
    later = write_snapshot(cache, REPO, files | {"extra.json": b"{}"}, LATER, "refs/pr/1")
    assert model_path(f"{REPO}@refs/pr/1") == model_path(f"{REPO}@{LATER}") == later
    assert model_path(f"{REPO}@{COMMIT}") == model_path(REPO) == first
    assert "HF_HUB_OFFLINE is set" in refusal(f"{REPO}@v2")


def test_a_process_stays_with_the_commit_that_it_met(cache, files):
    first = write_snapshot(cache, REPO, files)
    assert model_path(REPO, weights=False) == first
    write_snapshot(cache, REPO, files, LATER)
    assert model_path(REPO) == first


def test_llm_takes_revision_and_file_beside_the_name(cache):
    write_snapshot(cache, REPO, model_files(model_path("ksana-tiny")), revision="v1")
    llm = LLM(REPO, revision="v1", max_num_seqs=1, max_model_len=16)
    assert llm.name == f"{REPO}@v1" and llm.engine.source == (f"{REPO}@v1", "auto")


def test_where_weights_are_not_read_they_are_not_downloaded(cache, hub):
    files, config = model_files(model_path("ksana-tiny")), load_config("ksana-tiny")
    small = {name: content for name, content in files.items() if not name.endswith(".safetensors")}
    asked = hub(lambda revision, patterns: write_snapshot(cache, REPO, small))
    assert load_config(REPO) == config
    [(revision, patterns)] = asked
    assert revision is None and "config.json" in patterns and not [p for p in patterns if "safetensors" in p]
    assert LLM(REPO, load_format="dummy", max_num_seqs=1, max_model_len=16).model_config == config
    assert len(asked) == 1


def test_a_tokenizer_of_the_hub_has_all_tokens_that_it_has_in_a_directory(cache, hub, tmp_path):
    folder = Path(shutil.copytree(model_path("ksana-tiny"), tmp_path / "tiny"))
    (folder / "tokenizer.json").unlink()  # it would go before tokenizer.model, and have its own added tokens
    without = digest_of_files(folder)
    (folder / "added_tokens.json").write_text(json.dumps({"<more>": load_tokenizer(folder).vocab_size}))
    assert digest_of_files(folder) != without
    files = model_files(folder)
    hub(lambda revision, names: write_snapshot(cache, REPO, {n: files[n] for n in names if n in files}))
    assert load_tokenizer(REPO).encode("a<more>") == load_tokenizer(folder).encode("a<more>")
    assert load_tokenizer(REPO).vocab_size == load_tokenizer("ksana-tiny").vocab_size + 1


def test_only_files_that_are_read_are_downloaded(cache, shards, hub):
    write_snapshot(cache, REPO, {name: shards.pop(name) for name in ("config.json", "tokenizer.json")})
    asked = hub(lambda revision, patterns: write_snapshot(cache, REPO, shards))
    assert load_model(REPO)[0] == TINY
    [(_, patterns)] = asked
    others = ["pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors", "a.gguf", "model.py"]
    named = ["additional_chat_templates/rag.jinja", "chat_template.jinja"]
    assert [*filter_repo_objects([*shards, *others, *named], allow_patterns=patterns)] == [*shards, *named]


def test_a_split_gguf_file_needs_all_of_its_parts(cache, hub):
    parts = {f"Q4/model-0000{n}-of-00003.gguf": bytes([n]) for n in (1, 2, 3)}
    first = next(iter(parts))
    asked = hub(lambda revision, patterns: write_snapshot(cache, REPO, parts))
    assert model_path(f"{REPO}/{first}").read_bytes() == b"\1"
    assert asked == [(None, [*parts])]
    (snapshot := model_path(f"{REPO}/{first}").parents[1]).joinpath("Q4/model-00002-of-00003.gguf").unlink()
    hub(lambda revision, patterns: snapshot, parts)
    assert f"lacks Q4/model-00002-of-00003.gguf; `hf download {REPO} Q4/" in refusal(f"{REPO}/{first}")


def test_signs_of_patterns_in_a_file_name_stand_for_themselves(cache, hub):
    asked = hub(lambda revision, patterns: write_snapshot(cache, REPO, {"a[1]*.gguf": b"x"}))
    assert model_path(f"{REPO}/a[1]*.gguf").name == "a[1]*.gguf" and asked == [(None, ["a[[]1][*].gguf"])]


@pytest.mark.parametrize("lost", ["config.json", "model-00002-of-00003.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_copy_that_lacks_a_file_is_not_used(cache, shards, hub, lost, dangling):
    snapshot = write_snapshot(cache, REPO, shards)
    (os.remove if not dangling else lambda link: link.resolve().unlink())(snapshot / lost)
    # Without its index, a model is one file.
    missing = "model.safetensors" if lost.endswith("index.json") else lost
    hub(lambda revision, patterns: snapshot, shards | {missing: b""})
    assert f"its copy in the hub's cache, {snapshot}, lacks {missing}; `hf download" in refusal(REPO)
    hub(lambda revision, patterns: write_snapshot(cache, REPO, shards))
    assert model_path(REPO) == snapshot and (snapshot / lost).is_file()


def test_a_copy_without_a_tokenizer_is_used_if_the_hub_has_none(cache, files, hub):
    del files["tokenizer.json"]
    snapshot = write_snapshot(cache, REPO, files)
    asked = hub(lambda revision, patterns: snapshot)
    assert model_path(REPO) == snapshot and "tokenizer.json" in asked[0][1]
    hub(lambda revision, patterns: write_snapshot(cache, REPO, files | TOKENIZER))
    assert (model_path(REPO) / "tokenizer.json").is_file()


def test_offline_a_copy_without_a_tokenizer_is_all_there_is(cache, files):
    del files["tokenizer.json"]
    assert write_snapshot(cache, REPO, files) == model_path(REPO)


def test_a_repository_of_gguf_files_says_which_there_are(cache, files, hub):
    snapshot = write_snapshot(cache, REPO, {"config.json": files["config.json"]})
    listed = ["config.json", "a-Q4_0.gguf", *(f"b-{n}.gguf" for n in range(9))]
    hub(lambda revision, patterns: snapshot, listed)
    said = refusal(REPO)
    assert "there is no model.safetensors on the hub; its GGUF files: a-Q4_0.gguf, b-0.gguf" in said
    assert "and 2 more" in said
    assert "there is no c.gguf on the hub" in refusal(f"{REPO}/c.gguf")
    hub(lambda revision, patterns: snapshot, ["config.json", "pytorch_model.bin"])
    assert "no model.safetensors on the hub; supported: safetensors and GGUF files" in refusal(REPO)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            errors.GatedRepoError("403", response=response(403)),
            "access is gated: accept its terms on its page of the hub",
        ),
        (
            errors.RepositoryNotFoundError("401", response=response(401)),
            "there is no such path, and no such model on the hub; for a private one, log in",
        ),
        (
            errors.RevisionNotFoundError("404", response=response(404)),
            "someone/some-model has no revision 'v1' on the hub",
        ),
        (
            errors.HfHubHTTPError("503 Server Error\nmore", response=response(503)),
            "the download failed (HfHubHTTPError: 503 Server Error)",
        ),
        (errors.HFValidationError("Repo id must use alphanumeric"), "not a name that the hub allows: Repo id must"),
        (httpx2.ReadTimeout("timed out"), "the download failed (ReadTimeout: timed out)"),
        (OSError(errno.ENOSPC, "No space left on device"), "[Errno 28] No space left on device)"),
    ],
)
def test_each_error_of_the_hub_is_one_line_that_says_what_to_do(cache, hub, error, said):
    hub(error)
    assert said in (message := refusal(f"{REPO}@v1")) and message.startswith(f"{REPO}@v1: ")


def test_the_cause_below_an_error_of_the_library_is_named(cache, hub):
    error = errors.LocalEntryNotFoundError("Got: ...\nAn error happened while trying to locate the files")
    error.__cause__ = httpx2.ConnectError("[Errno -2] Name or service not known")
    hub(error)
    said = refusal(REPO)
    assert "no complete copy" in said and "(ConnectError: [Errno -2] Name or service not known)" in said


def test_offline_without_a_copy_says_how_to_get_one(cache):
    said = refusal(REPO)
    assert "HF_HUB_OFFLINE is set" in said and str(cache) in said and "unset it once to download" in said
    assert "is not in the hub's cache" in refusal(REPO, download=False)


def test_a_name_that_the_hub_does_not_allow_is_refused_without_a_request(cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert "not a name that the hub allows" in refusal("some--one/some..model")


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"weight_map": 5}'])
def test_of_an_index_that_cannot_be_read_the_loader_says_why(cache, files, content):
    del files["model.safetensors"]
    write_snapshot(cache, REPO, files | {"model.safetensors.index.json": content})
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json(: weight_map| is not valid| holds)"):
        load_model(REPO)


def test_the_digest_of_a_commit_does_not_depend_on_what_else_is_in_the_cache(cache, shards):
    few = digest_of_files(write_snapshot(cache, REPO, shards))
    config = {"config.json": shards["config.json"]} | TOKENIZER
    more = {"vocab.json": b"{}", "merges.txt": b""}
    assert digest_of_files(write_snapshot(cache, "someone/more", shards | more)) == few
    only = write_snapshot(cache, "someone/only", config)
    assert digest_of_files(only, "dummy") == digest_of_files(write_snapshot(cache, "a/b", shards), "dummy") != few


def test_the_environment_chooses_the_cache_and_local_models_do_not_import_the_library(cache, files):
    snapshot = write_snapshot(cache, REPO, files)
    code = (
        "import sys\nfrom ksana_jax.core.sources import model_path\n"
        "model_path('ksana-tiny')\nassert 'huggingface_hub' not in sys.modules\n"
        f"print(model_path({REPO!r}))\n"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, check=True, capture_output=True, text=True)
    assert Path(done.stdout.strip()) == snapshot


ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}


def test_an_adapter_is_a_folder_or_a_name_whose_two_files_are_downloaded(cache, tmp_path, hub):
    (tmp_path / "org" / "adapter").mkdir(parents=True)
    assert adapter_path("org/adapter") == Path("org/adapter")
    assert adapter_path("./none") == Path("./none") and adapter_path("none.gguf") == Path("none.gguf")
    asked = hub(lambda revision, patterns: write_snapshot(cache, REPO, ADAPTER | {"README.md": b""}))
    folder = adapter_path(f"{REPO}@main")
    assert asked == [("main", sorted(ADAPTER))] and folder == adapter_path(f"{REPO}@main")
    assert len(asked) == 1 and commit_of(folder) == COMMIT


def test_a_repository_without_an_adapter_is_refused(cache, hub):
    hub(lambda revision, patterns: write_snapshot(cache, REPO, {"adapter_config.json": b"{}"}), ["adapter_model.bin"])
    with pytest.raises(LoadError, match=r"there is no adapter_model\.safetensors on the hub"):
        adapter_path(REPO)
