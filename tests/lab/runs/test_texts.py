"""Excerpts are cut as `ExcerptSpec` says: with or without BOS, disjoint, side by side or overlapping."""

import pytest
from fake_llm import ByteTokenizer

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.texts import ExcerptSpec, cut_prompts, draw_excerpts

TEXT = "".join(chr(32 + i % 90) for i in range(100))


class Without(ByteTokenizer):
    """Has a BOS and does not add it."""

    def encode(self, text, add_special_tokens=True):
        return super().encode(text, add_special_tokens=False)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT[::-1])
    return [str(tmp_path / name) for name in ("a.txt", "b.txt")]


def drawn(files, tokenizer, count, cut, seed=0):
    return [excerpt.ids for excerpt in draw_excerpts(files, tokenizer, count, cut, seed)]


def test_bos_comes_if_the_tokenizer_adds_it_or_if_it_is_asked_for(files):
    body, bos = list(TEXT.encode()), [ByteTokenizer.bos_id]
    for tokenizer, asked, head in [
        (ByteTokenizer(), None, bos),
        (ByteTokenizer(), False, []),
        (Without(), None, []),
        (Without(), True, bos),
    ]:
        assert drawn(files[:1], tokenizer, 1, ExcerptSpec(20, asked)) == [head + body[: 20 - len(head)]]
    without = Without()
    without.bos_id = None
    assert drawn(files[:1], without, 1, ExcerptSpec(20)) == [body[:20]]
    with pytest.raises(ConfigError, match=r"settings\.bos is true, but the model's tokenizer has no BOS"):
        drawn(files, without, 1, ExcerptSpec(20, True))


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Without()])
@pytest.mark.parametrize("stride", [1, 7, 20])
def test_with_a_stride_each_token_that_has_one_before_it_is_scored_once(files, tokenizer, stride):
    cut = ExcerptSpec(20, stride=stride)
    head, step = len(cut.head(tokenizer)), min(stride, cut.room(tokenizer))
    per_text = (100 - cut.room(tokenizer)) // step + 1
    excerpts = draw_excerpts(files, tokenizer, 2 * per_text, cut, 0)
    assert all(len(excerpt.ids) == 20 for excerpt in excerpts)
    for text, mine in ((TEXT, excerpts[:per_text]), (TEXT[::-1], excerpts[per_text:])):
        scored = [token for excerpt in mine for token in excerpt.ids[excerpt.first_scored :]]
        body = list(text.encode())[: cut.room(tokenizer) + (per_text - 1) * step]
        # Without BOS, nothing comes before the first token of a text, nor of segments side by side.
        alone = [] if head else range(0, len(body), step) if step == 20 else [0]
        assert scored == [token for at, token in enumerate(body) if at not in alone]
    with pytest.raises(ConfigError, match=f"the texts have {2 * per_text} excerpts of 20 tokens"):
        draw_excerpts(files, tokenizer, 2 * per_text + 1, cut, 0)


def test_seeds_share_no_excerpts_of_a_stride(files):
    cut = ExcerptSpec(20, False, stride=20)
    seeds = [drawn(files, Without(), 3, cut, seed) for seed in (0, 1, 2)]
    texts = [list(text.encode()) for text in (TEXT, TEXT[::-1])]
    listed = [text[at : at + 20] for text in texts for at in range(0, 100, 20)]
    assert seeds[0] + seeds[1] + seeds[2] == listed[:9]


def test_seeds_share_no_prompts_of_a_single_text_while_it_lasts(files):
    """Its 100 tokens are 14 prompts of seven after BOS. Of several texts the seed draws the order."""
    one, tokenizer = files[:1], ByteTokenizer()
    seeds = [cut_prompts(one, tokenizer, 2, 8, seed) for seed in range(8)]
    assert [ids for seed in seeds[:7] for ids in seed] == [[256, *TEXT[at : at + 7].encode()] for at in range(0, 98, 7)]
    assert seeds[7] == seeds[0]
    assert cut_prompts(files, tokenizer, 2, 8, 0) in (seeds[0], cut_prompts(files[1:], tokenizer, 2, 8, 0))
