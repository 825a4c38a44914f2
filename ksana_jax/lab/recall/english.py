"""English words for RULER's questions. None is a part of another, so an answer is found only where it is given."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

ADJECTIVES = (
    "amber ancient autumn awkward barren bitter blunt bold brave breezy brief bright brisk broken bronze calm candid "
    "careful cheap chilly civic clever cloudy clumsy coarse copper cosmic crimson crisp crooked cruel curious daring "
    "decent deep dense distant dizzy double drowsy dusty eager early earnest eastern elegant empty exact fading fancy "
    "fierce final flat fluent foggy formal fragile frozen funny gentle giant gloomy golden graceful grave greedy "
    "grumpy happy harsh hasty heavy hollow honest humble hungry idle jolly joyful keen kind lazy lively lonely loyal "
    "lucky marble mellow merry mighty modest muddy narrow nervous noble noisy northern orange patient plain polite "
    "private proud purple quick quiet rapid rough rural rusty salty scarlet secret shallow sharp shiny silent silver "
    "simple sleepy slender smooth solemn sour southern spicy steady steep stubborn sudden sunny swift tender thirsty "
    "tidy timid tiny tough tranquil urban useful vast velvet violet vivid warm weary western wild windy wise wooden "
    "yellow young zesty"
).split()

NOUNS = (
    "acorn anchor apron badger balcony banjo barrel basket beacon beaver blanket bottle bridge broom bucket button "
    "cabin camel candle canyon carpet castle cello cherry chimney circus cliff coconut compass cookie coral cottage "
    "cradle cricket crown curtain daisy desert dolphin donkey dragon drum eagle elbow engine falcon feather ferry "
    "fiddle flute forest fossil fountain garden garlic ginger glacier goblet guitar hammer harbor harvest helmet "
    "heron hotel igloo island jacket jaguar jigsaw jungle kettle kitchen kitten ladder lagoon lantern lemon library "
    "lizard lobster magnet mango maple market meadow mirror monkey mountain museum mustard napkin noodle oasis ocean "
    "onion orchard otter oyster palace panda parrot pebble pencil pepper piano pigeon pillow planet pocket potato "
    "pumpkin puzzle pyramid quartz quilt rabbit raccoon radish ribbon rocket saddle sailor salmon sandal shadow "
    "shovel spider spoon stable statue sunset teapot temple thunder ticket tiger tomato tower tractor trumpet tulip "
    "tunnel turtle umbrella vase village violin volcano waffle wagon walnut whistle willow window wizard zebra"
).split()


def pairs(rng: random.Random) -> Iterator[str]:
    """Yields distinct pairs such as "quiet-willow"; after 24,178 of them, the same ones with a number."""
    every = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]
    for turn in itertools.count():
        rng.shuffle(every)
        yield from (f"{pair}-{turn}" if turn else pair for pair in every)
