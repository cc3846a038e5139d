"""Pairs: what exists on both sides, by its name here and there, and why the rest is not compared."""

from __future__ import annotations

from dataclasses import dataclass

RATIO = 0.8  # of the prompt, that kvpress is told to drop; it keeps int(T * (1 - RATIO)) of T tokens
LAG = 8  # tokens of a block of LagKV, on both sides
WINDOW = 16  # queries that vote, on both sides


@dataclass(frozen=True)
class Pair:
    """method: ours, without its budget, which is the count that kvpress keeps. press: {class: parameters}, a
    press within a press likewise; None for a plain cache. eager: the press asks for that attention of
    transformers' which returns its weights. Where their definitions part, `eval/reproduce/peers.py` says."""

    method: str
    press: dict | None
    eager: bool = False

    @property
    def told(self) -> str:
        """The press as one writes it in Python."""
        return "no press" if self.press is None else written(self.press)


def written(press: dict) -> str:
    """{class: parameters} as a call."""
    ((name, given),) = press.items()
    parts = [written(v) if isinstance(v, dict) else f"{k}={v}" for k, v in given.items()]
    return f"{name}({', '.join(parts)})"


def _snapkv(kernel: int) -> dict:
    return {"SnapKVPress": {"window_size": WINDOW, "kernel_size": kernel}}


KEYDIFF: dict = {"KeyDiffPress": {}}
PAIRS = (
    Pair("full", None),
    Pair("sinks", {"StreamingLLMPress": {}}),
    Pair("sinks:renumber=true", {"KeyRerotationPress": {"press": {"StreamingLLMPress": {}}}}),
    Pair("tova", {"TOVAPress": {}}),
    Pair("snapkv:kernel=1", _snapkv(1)),
    Pair("snapkv", _snapkv(5)),
    Pair("pyramidkv:kernel=1", {"PyramidKVPress": {"window_size": WINDOW, "kernel_size": 1}}),
    Pair("h2o:recent=0", {"ObservedAttentionPress": {}}, eager=True),
    Pair("keydiff", KEYDIFF),
    Pair("keydiff:renumber=true", {"KeyRerotationPress": {"press": KEYDIFF}}),
    Pair("keydiff:chunk=8", {"ChunkKVPress": {"press": KEYDIFF, "chunk_length": 8}}),
    Pair("keydiff:merge=true", {"MergingPress": {"press": KEYDIFF}}),
    Pair("keynorm", {"KnormPress": {}}),
    Pair(f"lagkv:lag={LAG}", {"LagKVPress": {"lag_size": LAG}}),
    Pair("expected", {"ExpectedAttentionPress": {}}),
    Pair("adakv:of=keydiff", {"AdaKVPress": {"press": KEYDIFF}}),
    Pair("adakv:of=snapkv", {"AdaKVPress": {"press": _snapkv(5)}}),
    Pair("kvzip", {"KVzipPress": {}}),
    Pair("kvzip:over=layer", {"KVzipPress": {"layerwise": True}}),
    Pair("random", {"RandomPress": {"seed": 0}}),
)

HUB = "loads what was trained for a model from a hub"
OTHER = "no method of ours has its idea"
APART = "compresses while decoding too; here a prompt is compressed once"
NOT_COMPARED = {
    "BasePress": "abstract",
    "ScorerPress": "abstract",
    "KVPressTextGenerationPipeline": "no press",
    "ComposedPress": "a wrapper of two presses",
    "PerLayerCompressionPress": "a wrapper; a budget of ours is one for all layers, or the method's own",
    "QFilterPress": HUB,
    "DuoAttentionPress": HUB,
    "KVzapPress": HUB,
    "FastKVzipPress": HUB,
    "ExpectedAttentionStatsPress": HUB,
    "RestoreKVPress": HUB,
    "LUKVPress": "loads a curve of budgets for a model from a hub",
    "DMSPress": "a threshold: how many tokens stay is not said beforehand",
    "SimLayerKVPress": "a threshold: how many tokens stay is not said beforehand",
    "DecodingPress": APART,
    "CompressionRatioDecodingPress": APART,
    "PrefillDecodingPress": APART,
    "CAMPress": "merges at random while decoding",
    "FinchPress": "needs a delimiter token that the model was not trained with",
    "ThinKPress": "drops channels, not tokens",
    "BlockPress": "drops while the prompt is read block by block; ours sees the whole prompt",
    "ChunkPress": "compresses every chunk of a prompt alone",
    "EntropyGatedChunkKVPress": OTHER,
    "CriticalKVPress": OTHER,
    "CriticalAdaKVPress": OTHER,
    "CURPress": OTHER,
    "CapPress": OTHER,
    "CompactorPress": OTHER,
    "LeverageScorePress": OTHER,
    "NonCausalAttnPress": OTHER,
    "KVgradPress": OTHER,
    "KVComposePress": OTHER,
}


def named(press: dict | None) -> set[str]:
    """The classes that a press is made of."""
    if press is None:
        return set()
    ((name, given),) = press.items()
    return {name}.union(*(named(value) for value in given.values() if isinstance(value, dict)))
