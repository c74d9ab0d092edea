"""Data to train on: readers of public formats and a generator, all giving ``ClickLog``."""

from heterps_compile.data.avazu import read_avazu
from heterps_compile.data.click_log import Batch, ClickLog
from heterps_compile.data.criteo import read_criteo
from heterps_compile.data.movielens import read_movielens
from heterps_compile.data.synthetic import PlantedClicks, Recipe, generate

__all__ = ["Batch", "ClickLog", "PlantedClicks", "Recipe", "generate", "read_avazu", "read_criteo", "read_movielens"]
