"""Whole: fetch each layer while the previous one computes (FlexGen, Sheng et al. 2023, arXiv 2303.06865)."""

from .fetch import Fetch


class Whole(Fetch):
    """Fetch all of a layer's K and V at every step, while the previous layer computes, as in FlexGen."""

    learns = chooses = False

    def whole(self, index: int) -> bool:
        return True
