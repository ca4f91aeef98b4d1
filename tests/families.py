"""Families of models for tests: their configs as published models have them, and what is special about each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import transformers

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 100 for i in range(48)],
    "long_factor": [2.0 + i / 100 for i in range(48)],
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class Family:
    """One row of the support table."""

    title: str
    config_class: str
    special: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        """Transformers' name."""
        return getattr(transformers, self.config_class).model_type

    def config(self) -> transformers.PretrainedConfig:
        """At its real size, or nearly."""
        return getattr(transformers, self.config_class)(**self.arguments)


EVERYDAY = {
    "llama": Family(
        "Llama 3",
        "LlamaConfig",
        "grouped queries, scaled rotary frequencies",
        {"num_key_value_heads": 8, "rope_parameters": LLAMA3_ROPE},
    ),
    "smollm2": Family(
        "SmolLM2",
        "LlamaConfig",
        "9 heads on 3, tied embeddings",
        {
            "hidden_size": 576,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": Family(
        "Qwen2, Qwen2.5",
        "Qwen2Config",
        "14 heads on 2, biases, tied embeddings",
        {
            "hidden_size": 896,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_window": Family(
        "Qwen2 with its window",
        "Qwen2Config",
        "window in the upper layers",
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "qwen3": Family(
        "Qwen3",
        "Qwen3Config",
        "norms of queries and keys, tied embeddings",
        {
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": Family("Qwen3 MoE", "Qwen3MoeConfig", "experts", {"head_dim": 128}),
    "qwen3_moe_mixed": Family(
        "Qwen3 MoE, partly dense",
        "Qwen3MoeConfig",
        "experts in some layers",
        {"mlp_only_layers": [3], "norm_topk_prob": True},
    ),
    "mistral": Family("Mistral", "MistralConfig", "window"),
    "mixtral": Family("Mixtral", "MixtralConfig", "experts"),
    "gemma": Family("Gemma", "GemmaConfig", "scaled and tied embeddings"),
    "gemma2": Family(
        "Gemma 2",
        "Gemma2Config",
        "soft-capped scores and logits, window in every other layer, tied embeddings",
    ),
    "gemma3": Family(
        "Gemma 3 (text)",
        "Gemma3TextConfig",
        "window in most layers, two rotary bases, norms of queries and keys",
    ),
    "phi3": Family("Phi-3", "Phi3Config", "fused q, k and v, window", {"sliding_window": 2047}),
    "phi3_longrope": Family(
        "Phi-3.5, Phi-4 mini",
        "Phi3Config",
        "fused q, k and v; rotary factors by length, documents up to 4,096 tokens",
        {"rope_parameters": LONGROPE, "max_position_embeddings": 131072},
    ),
    "phi": Family("Phi-1.5, Phi-2", "PhiConfig", "partial rotary, biases"),
    "olmo2": Family("OLMo 2", "Olmo2Config", "norms after the layer, and of queries and keys"),
    "granite": Family(
        "Granite 3",
        "GraniteConfig",
        "multipliers of embeddings, scores, residuals and logits, tied embeddings",
        {
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
            "tie_word_embeddings": True,
        },
    ),
    "granite_moe": Family(
        "Granite 3 MoE",
        "GraniteMoeConfig",
        "experts, multipliers",
        {"logits_scaling": 6.0, "embedding_multiplier": 12.0},
    ),
    "cohere": Family(
        "Command R",
        "CohereConfig",
        "scaled logits, norms of queries and keys",
        {"logit_scale": 0.0625, "use_qk_norm": True},
    ),
    "cohere2": Family("Command R7B, Command A", "Cohere2Config", "window, layers without positions"),
    "smollm3": Family("SmolLM3", "SmolLM3Config", "layers without positions"),
    "gpt_oss": Family("GPT-OSS", "GptOssConfig", "attention sinks, window in every other layer, experts"),
    "gpt_neox": Family("GPT-NeoX, Pythia", "GPTNeoXConfig", "fused q, k and v, partial rotary"),
    "gpt2": Family("GPT-2", "GPT2Config", "learned positions, attention dropout"),
    "starcoder2": Family("StarCoder2", "Starcoder2Config", "window, biases", {"sliding_window": 4096}),
    "glm4": Family("GLM-4 (0414)", "Glm4Config", "partial rotary, norms around each layer"),
    "deepseek_v3": Family(
        "DeepSeek-V3, R1", "DeepseekV3Config", "latent attention: values narrower than keys; experts"
    ),
    "deepseek_v2_lite": Family(
        "DeepSeek-V2 Lite",
        "DeepseekV2Config",
        "latent attention without a query latent; experts",
        {
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
        },
    ),
}
"""The families that most people train; every test goes through them."""

OTHERS = {
    "afmoe": Family("Trinity", "AfmoeConfig", "gated attention, window, experts"),
    "apertus": Family("Apertus", "ApertusConfig", "learned activation, norms of queries and keys"),
    "arcee": Family("AFM", "ArceeConfig", "squared ReLU"),
    "aria": Family("Aria (text)", "AriaTextConfig", "experts"),
    "axk1": Family("A.X-K1", "AXK1Config", "latent attention, experts"),
    "beam": Family("Beam", "BeamConfig", "gated attention, window, experts, soft-capped logits"),
    "bitnet": Family("BitNet", "BitNetConfig", "norms inside attention"),
    "codegen": Family("CodeGen", "CodeGenConfig", "fused q, k and v, partial rotary"),
    "cohere2_moe": Family("Command A+", "Cohere2MoeConfig", "window, layers without positions, experts"),
    "ctrl": Family("CTRL", "CTRLConfig", "sinusoidal positions"),
    "cwm": Family("CWM", "CwmConfig", "window in most layers"),
    "deepseek_v2": Family(
        "DeepSeek-V2",
        "DeepseekV2Config",
        "latent attention, experts in groups",
        {
            "n_group": 8,
            "topk_group": 3,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1536,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
        },
    ),
    "diffllama": Family("DiffLlama", "DiffLlamaConfig", "differential attention: pairs of heads"),
    "dots1": Family(
        "dots.llm1",
        "Dots1Config",
        "experts, norms of queries and keys",
        {
            "n_routed_experts": 128,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
    ),
    "ernie4_5": Family("ERNIE 4.5", "Ernie4_5Config", "8 heads on 1"),
    "ernie4_5_moe": Family("ERNIE 4.5 MoE", "Ernie4_5_MoeConfig", "experts"),
    "exaone": Family("EXAONE 3.5", "ExaoneConfig", "grouped queries"),
    "exaone4": Family("EXAONE 4", "Exaone4Config", "window, layers without positions"),
    "exaone_moe": Family("K-EXAONE", "ExaoneMoeConfig", "window, experts"),
    "flex_olmo": Family("FlexOlmo", "FlexOlmoConfig", "experts, norms after the layer"),
    "flint": Family("Flint", "FlintConfig", "window, experts"),
    "gemma3n": Family(
        "Gemma 3n (text)",
        "Gemma3nTextConfig",
        "layers that share keys and values, window, soft-capped logits",
    ),
    "gemma4": Family("Gemma 4 (text)", "Gemma4TextConfig", "wider heads in layers without window"),
    "gemma4_shared": Family(
        "Gemma 4 E2B (text)",
        "Gemma4TextConfig",
        "layers that share keys and values, window",
        {"num_kv_shared_layers": 18},
    ),
    "glm": Family("GLM-4", "GlmConfig", "partial rotary"),
    "glm4_moe": Family("GLM-4.5", "Glm4MoeConfig", "experts, partial rotary"),
    "glm4_moe_lite": Family("GLM-4.7 Flash", "Glm4MoeLiteConfig", "latent attention, experts"),
    "gptj": Family("GPT-J", "GPTJConfig", "partial rotary"),
    "gpt_bigcode": Family("StarCoder", "GPTBigCodeConfig", "all heads on 1, learned positions, dropout"),
    "granite4_dense": Family(
        "Granite 4 micro",
        "GraniteMoeHybridConfig",
        "attention alone, without the family's Mamba layers",
        {
            "num_hidden_layers": 40,
            "layer_types": ["full_attention"] * 40,
            "num_key_value_heads": 8,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 8192,
            "position_embedding_type": "rope",
            "mamba_n_heads": 64,
        },
    ),
    "granite_swa": Family("Granite SWASH", "GraniteSWAConfig", "window in some layers"),
    "granitemoe_swa": Family("Granite SWASH MoE", "GraniteMoeSWAConfig", "window in some layers, experts"),
    "granitemoeshared": Family(
        "Granite MoE, shared expert", "GraniteMoeSharedConfig", "experts and a shared one"
    ),
    "helium": Family("Helium", "HeliumConfig", "grouped queries"),
    "hrm_text": Family("HRM-Text", "HrmTextConfig", "layers that run several times"),
    "hunyuan": Family(
        "Hunyuan dense",
        "HunYuanDenseV1Config",
        "norms of queries and keys",
        {"head_dim": 128, "num_key_value_heads": 8},
    ),
    "hunyuan_moe": Family(
        "Hunyuan MoE",
        "HunYuanMoEV1Config",
        "experts",
        {"head_dim": 128, "num_key_value_heads": 8, "num_experts": 16},
    ),
    "hy_v3": Family("Hy3", "HYV3Config", "experts"),
    "hyperclovax": Family("HyperCLOVA X Think", "HyperCLOVAXConfig", "multipliers"),
    "internlm3": Family("InternLM3", "InternLM3Config", "grouped queries"),
    "iquestcoder": Family("IQuest-Coder", "IQuestCoderConfig", "grouped queries"),
    "jais2": Family("Jais 2", "Jais2Config", "squared ReLU, biases"),
    "jetmoe": Family("JetMoe", "JetMoeConfig", "experts of attention"),
    "kolibri1": Family("Kolibri 1", "Kolibri1Config", "window, experts"),
    "laguna": Family(
        "Laguna",
        "LagunaConfig",
        "window in most layers, experts",
        {"num_hidden_layers": 40, "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 10},
    ),
    "longcat_flash": Family("LongCat-Flash", "LongcatFlashConfig", "two latent attentions a layer, experts"),
    "mellum": Family(
        "Mellum 2",
        "MellumConfig",
        "window in some layers, experts",
        {"num_hidden_layers": 28, "layer_types": ["full_attention", "sliding_attention"] * 14},
    ),
    "mimo_v2_flash": Family("MiMo-V2-Flash", "MiMoV2FlashConfig", "attention sinks, window, narrower values"),
    "minicpm3": Family("MiniCPM3", "MiniCPM3Config", "latent attention, multipliers"),
    "minimax_m2": Family("MiniMax-M2", "MiniMaxM2Config", "experts, norms of queries and keys"),
    "ministral": Family(
        "Ministral 8B",
        "MinistralConfig",
        "window in most layers",
        {
            "head_dim": 128,
            "num_hidden_layers": 36,
            "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 9,
        },
    ),
    "ministral3": Family("Ministral 3", "Ministral3Config", "queries scaled by position"),
    "nanochat": Family("nanochat", "NanoChatConfig", "soft-capped logits, norms of queries and keys"),
    "olmo": Family("OLMo", "OlmoConfig", "norms without weights"),
    "olmo3": Family("OLMo 3", "Olmo3Config", "window in most layers"),
    "olmoe": Family("OLMoE", "OlmoeConfig", "experts"),
    "biogpt": Family("BioGPT", "BioGptConfig", "learned positions, attention dropout"),
    "opt": Family("OPT", "OPTConfig", "learned positions, biases"),
    "persimmon": Family("Persimmon", "PersimmonConfig", "fused q, k and v, partial rotary"),
    "phimoe": Family("Phi-3.5 MoE", "PhimoeConfig", "experts"),
    "qwen2_moe": Family("Qwen1.5 MoE, Qwen2 MoE", "Qwen2MoeConfig", "experts and a shared one"),
    "sarvam_mla": Family("Sarvam 105B", "SarvamMLAConfig", "latent attention, experts"),
    "sarvam_moe": Family("Sarvam 30B", "SarvamMoEConfig", "experts"),
    "seed_oss": Family("Seed-OSS", "SeedOssConfig", "biases, attention dropout"),
    "solar_open": Family("Solar Open", "SolarOpenConfig", "experts"),
    "vaultgemma": Family("VaultGemma", "VaultGemmaConfig", "soft-capped scores and logits, window"),
    "youtu": Family("Youtu-LLM", "YoutuConfig", "latent attention"),
}
"""Further families that are computed right."""

FAMILIES = EVERYDAY | OTHERS

STATEFUL = {
    "bailing_hybrid": Family("Ling 3", "BailingHybridConfig", "linear attention"),
    "bamba": Family("Bamba", "BambaConfig", "Mamba layers"),
    "falcon_h1": Family("Falcon-H1", "FalconH1Config", "Mamba beside attention"),
    "falcon_mamba": Family("Falcon Mamba", "FalconMambaConfig", "Mamba layers"),
    "granite4": Family(
        "Granite 4 H",
        "GraniteMoeHybridConfig",
        "Mamba layers",
        {
            "num_hidden_layers": 10,
            "layer_types": ["linear_attention"] * 9 + ["full_attention"],
            "mamba_n_heads": 64,
        },
    ),
    "jamba": Family("Jamba", "JambaConfig", "Mamba layers"),
    "kimi_linear": Family("Kimi Linear", "KimiLinearConfig", "linear attention"),
    "lfm2": Family(
        "LFM2",
        "Lfm2Config",
        "convolutions",
        {
            "num_hidden_layers": 16,
            "layer_types": (["conv"] * 2 + ["full_attention"] + ["conv"]) * 4,
        },
    ),
    "lfm2_moe": Family(
        "LFM2 MoE",
        "Lfm2MoeConfig",
        "convolutions, experts",
        {"num_hidden_layers": 24, "layer_types": (["conv"] * 2 + ["full_attention"]) * 8},
    ),
    "mamba": Family("Mamba", "MambaConfig", "Mamba layers alone"),
    "mamba2": Family("Mamba 2", "Mamba2Config", "Mamba layers alone"),
    "minimax": Family("MiniMax-Text-01", "MiniMaxConfig", "lightning attention"),
    "nemotron_h": Family("Nemotron-H", "NemotronHConfig", "Mamba layers"),
    "olmo_hybrid": Family("OLMo Hybrid", "OlmoHybridConfig", "linear attention"),
    "qwen3_5": Family("Qwen3.5 (text)", "Qwen3_5TextConfig", "linear attention"),
    "qwen3_next": Family("Qwen3-Next", "Qwen3NextConfig", "linear attention"),
    "recurrent_gemma": Family("RecurrentGemma", "RecurrentGemmaConfig", "recurrent layers"),
    "rwkv": Family("RWKV", "RwkvConfig", "recurrent layers alone"),
    "xlstm": Family("xLSTM", "xLSTMConfig", "recurrent layers alone"),
    "zamba": Family("Zamba", "ZambaConfig", "Mamba layers"),
    "zamba2": Family("Zamba 2", "Zamba2Config", "Mamba layers"),
}
"""Families whose layers carry a state from token to token, and the convolutions among them; they are refused."""

UNFIT = {
    "deepseek_v32": Family("DeepSeek-V3.2", "DeepseekV32Config", "keys chosen by an indexer"),
    "deepseek_v4": Family("DeepSeek-V4", "DeepseekV4Config", "compressed keys"),
    "glm5": Family("GLM-5", "GlmMoeDsaConfig", "keys chosen by an indexer"),
    "llama4": Family("Llama 4 (text)", "Llama4TextConfig", "attention in chunks of 8,192 tokens"),
    "minimax_m3": Family(
        "MiniMax-M3 (text)",
        "MiniMaxM3VLTextConfig",
        "blocks of keys chosen by an indexer",
        {
            "num_hidden_layers": 8,
            "layer_types": ["full_attention"] * 2 + ["minimax_m3_sparse"] * 6,
            "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6,
        },
    ),
    "doge": Family("Doge", "DogeConfig", "keys chosen by a learned mask"),
    "bloom": Family("BLOOM", "BloomConfig", "ALiBi"),
    "mpt": Family("MPT", "MptConfig", "ALiBi"),
    "falcon": Family(
        "Falcon",
        "FalconConfig",
        "attention of its own",
        {
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
        },
    ),
    "gpt_neo": Family("GPT-Neo", "GPTNeoConfig", "attention of its own"),
    "stablelm": Family("StableLM", "StableLmConfig", "layers that drop the documents' boundaries"),
    "nemotron": Family(
        "Nemotron 4, Minitron",
        "NemotronConfig",
        "layers that drop the documents' boundaries",
        {"num_key_value_heads": 8},
    ),
    "xglm": Family("XGLM", "XGLMConfig", "positions of its own", {"attention_dropout": 0.0}),
    "dbrx": Family("DBRX", "DbrxConfig", "a config that Transformers itself can't build"),
    "gemma3_vision": Family("Gemma 3 with vision", "Gemma3Config", "more than text"),
    "llama4_vision": Family("Llama 4 with vision", "Llama4Config", "more than text"),
}
"""Families that are refused for other reasons."""

REFUSED = STATEFUL | UNFIT
