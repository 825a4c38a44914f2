"""Prefixes that are configured: from a file, with servers that they keep."""

import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.router.prefix_file import GivenPrefix, read_prefix_file
from tests.serve.router.invariants import check_router
from tests.serve.router.prompts import request, router
from tests.serve.router.test_policies import ask, table


def write(tmp_path, text):
    path = tmp_path / "prefixes.jsonl"
    path.write_text(text, "utf-8")
    return path


def test_a_file_has_texts_or_token_ids_and_servers(tmp_path):
    path = write(tmp_path, '{"text": "Be brief."}\n\n{"token_ids": [1, 0, 7], "servers": ["http://a:1"]}\n')
    assert read_prefix_file(path) == [
        GivenPrefix(f"{path}, line 1", "Be brief.", ()),
        GivenPrefix(f"{path}, line 3", None, (1, 0, 7), ("http://a:1",)),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ('"text"', "is no object"),
        ('{"txt": "a"}', "there is no field 'txt'; the nearest is 'text'"),
        ("{}", "give either text or token_ids"),
        ('{"text": "a", "token_ids": [1]}', "give either text or token_ids"),
        ('{"text": ""}', "text is '', must be a string that is not empty"),
        ('{"token_ids": []}', "must be a list of integers from 0"),
        ('{"token_ids": [1, -2]}', "must be a list of integers from 0"),
        ('{"token_ids": [true]}', "must be a list of integers from 0"),
        ('{"token_ids": [2147483648]}', "must be a list of integers from 0"),
        ('{"text": "a", "servers": "http://a"}', "servers is 'http://a', must be a list of addresses"),
    ],
)
def test_a_bad_line_is_one_error_with_its_number(tmp_path, line, said):
    path = write(tmp_path, '{"text": "good"}\n' + line + '\n{"text": "good"}')
    with pytest.raises(ConfigError) as error:
        read_prefix_file(path)
    assert str(error.value).startswith(f"{path}, line 2: ") and said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_or_has_no_prefix_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read prefix file .*: No such file"):
        read_prefix_file(tmp_path / "none")
    with pytest.raises(ConfigError, match="has no prefix"):
        read_prefix_file(write(tmp_path, "\n \n"))


def test_given_servers_get_a_prefix_at_once_and_keep_it():
    r = router(table(shrink_after_s=5), "abcd")
    r.configure_prefix(request("x", 300, "abc").hashes, 0.0, ["b", "c"])
    assert set(ask(r, 60, "abc", now=1.0)) <= {"b", "c"}  # 0.3 s of work a second are enough for one
    [prefix] = r.require_table().table.prefixes.values()
    assert prefix.given == set(prefix.members) == {1, 2}


def test_a_given_server_joins_when_it_comes_and_when_it_comes_back():
    r = router(table(), "ab")
    r.configure_prefix(request("x", 300, "abc").hashes, 0.0, ["b", "late"])
    [prefix] = r.require_table().table.prefixes.values()
    r.add_server("late")
    assert prefix.members == [1, 2]
    r.remove("b", 1.0)
    assert prefix.members == [2] and prefix.given == {2}
    r.add_server("b")
    assert sorted(prefix.members) == [1, 2]
    check_router(r)


def test_a_server_takes_as_many_given_prefixes_as_it_may():
    r = router(table(max_prefixes_per_server=2), "ab")
    for text in ("ab", "cd", "ef"):
        r.configure_prefix(request("x", 200, text).hashes, 0.0, ["a"])
    assert r.require_table().table.num_prefixes.tolist() == [2, 0]
    check_router(r)


def test_prefixes_need_the_policy_with_a_table_and_a_full_block():
    with pytest.raises(ConfigError, match="are configured for policy prefix_table, not MinTTFT"):
        router("min_ttft").configure_prefix([b"a"], 0.0)
    with pytest.raises(ConfigError, match="no full block of 100 tokens"):
        router("prefix_table").configure_prefix([], 0.0)
