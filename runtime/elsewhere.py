"""Advice for error messages: which other software could serve a model, by its files and config.json."""

from __future__ import annotations

from collections.abc import Collection

#: What serves most of what the native engine does not.
VLLM = "serve it with --engine vllm"
#: By part of the architecture's name; the first match counts.
_BY_ARCHITECTURE = (
    ("Whisper", "vLLM or faster-whisper serves speech models"),
    ("T5", "transformers runs encoder-decoder models"),
    ("Bart", "transformers runs encoder-decoder models"),
    ("Marian", "transformers runs encoder-decoder models"),
    ("ConditionalGeneration", f"it may read images or sound: {VLLM}"),
    ("Vision", f"it may read images or sound: {VLLM}"),
    ("SequenceClassification", "Text Embeddings Inference or vLLM serves classifiers and rerankers"),
    ("TokenClassification", "transformers runs taggers"),
    ("MaskedLM", "Text Embeddings Inference serves encoders"),
    ("CausalLM", VLLM),
    ("LMHead", VLLM),
    ("Model", "Text Embeddings Inference or vLLM serves embedding models"),
)
#: By quantization_config's quant_method.
_BY_METHOD = {
    "exl2": "TabbyAPI (ExLlamaV2) serves it",
    "exl3": "TabbyAPI (ExLlamaV3) serves it",
    "gguf": "llama.cpp or Ollama serves it",
    "mlx": "mlx-lm serves it",
    "bitnet": "bitnet.cpp or transformers runs it",
}


def server_of_architecture(name: object) -> str:
    """Software for models of this architecture."""
    return next((who for part, who in _BY_ARCHITECTURE if part in str(name)), "transformers may run it")


def server_of_quantisation(method: object) -> str:
    """Software for weights quantised by `method`; for None or unknown methods a general answer."""
    return _BY_METHOD.get(str(method).lower(), VLLM)


def without_weights(names: Collection[str]) -> str:
    """What a model without safetensors is, by its files' names, and what to do with it; "" when unknown."""
    if "model_index.json" in names:
        return "it is a diffusion pipeline; diffusers runs it"
    if "adapter_config.json" in names:
        return "it is an adapter (PEFT, LoRA); merge it into its base model and save that, or serve it with vLLM"
    if any(name.endswith(".gguf") for name in names):
        return "its weights are GGUF; llama.cpp or Ollama serves it; or give the model that it was made from"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return (
            "its weights are pickles, which are never loaded; give a repository with safetensors, or convert it "
            "with transformers"
        )
    if any(name.endswith((".msgpack", ".h5", ".onnx", ".tflite")) for name in names):
        return "its weights are of another framework; give a repository with safetensors"
    return ""
