"""Whole: each layer whole, while the layer before computes (FlexGen, Sheng et al. 2023, arXiv 2303.06865)."""

from .fetch import Fetch


class Whole(Fetch):
    """Fetch all of K and V of the layer at every step, while the layer before computes: FlexGen's."""

    learns = chooses = False

    def whole(self, index: int) -> bool:
        return True
