//! The models whose shapes synthetic models have, as numbers.

use super::shape::{Kind, Latent, Mixer, Shape, SharingExperts};

/// Which model the shape is that of.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Size {
    /// For tests: a megabyte or two.
    Tiny,
    /// Not much more, with all that the persistent kernels for NVIDIA devices need.
    Small,
    /// The same with experts.
    SmallMoe,
    /// The same with Mamba 2 in half of the layers.
    SmallHybrid,
    /// A Granite 4 with experts in two layers, one of them with attention.
    SmallGranite,
    /// A Nemotron 3 of four layers.
    SmallNemotron,
    /// The same with Gated DeltaNet in half of the layers.
    SmallDelta,
    /// A Gemma 4 of four layers, of which two share keys and values.
    SmallGemma4,
    /// Latent attention, in the second layer with experts.
    SmallLatent,
    /// That of Llama 3.2 1B.
    #[value(name = "1b")]
    OneB,
    /// That of Qwen 2.5 1.5B, as a Llama: without biases.
    #[value(name = "1.5b")]
    OneAndHalfB,
    /// That of Llama 3.1 8B.
    #[value(name = "8b")]
    EightB,
    /// That of Llama 3.1 70B.
    #[value(name = "70b")]
    SeventyB,
    /// A small Qwen 3 with experts: 1.7 billion weights, of which a token reads a fifth.
    Moe,
    /// Four layers with experts like those of Nemotron 3 Nano: 128, of which a token uses six.
    Nano,
    /// Nemotron 3 Nano 30B-A3B: 23 layers of Mamba 2, 23 with 128 experts, of which a token uses
    /// six, and 6 of attention.
    Nemotron,
    /// That of Granite 4.0 H 1B: attention in 4 of 40 layers, Mamba 2 in the others.
    Hybrid,
    /// Granite 4.0 H Tiny: the same with 64 experts in each layer, of which a token uses six.
    Granite,
    /// That of Qwen 3.5 4B: attention in 8 of 32 layers, Gated DeltaNet in the others.
    Delta,
    /// That of Gemma 4 E4B: an input of its own for each layer, sliding windows in five of six
    /// layers, and 18 of 42 layers that share the keys and values of earlier ones.
    Gemma4,
    /// Ten layers of Qwen 3 30B-A3B, with a smaller vocabulary: 128 experts, of which a token uses
    /// eight.
    A3b,
    /// Qwen 3 30B-A3B with all layers and tokens.
    #[value(name = "30b-a3b")]
    WholeA3b,
    /// GPT-OSS 120B: 128 experts, of which a token uses four.
    #[value(name = "gpt-oss-120b")]
    GptOss,
    /// Three layers of GLM 4.5 Air, the first without experts, with a smaller vocabulary: a shared
    /// expert and 128 others, of which a token uses eight.
    GlmMoe,
    /// Ten layers of GLM 4.7 Flash, the first without experts, with a smaller vocabulary: latent
    /// attention, a shared expert and 64 others, of which a token uses four.
    GlmFlash,
    /// BGE Large: an encoder, for vectors of texts of up to 512 tokens.
    BgeLarge,
}

impl Size {
    pub(super) fn shape(self) -> Shape {
        let (one_b, small) = (ONE_B, SMALL);
        match self {
            Size::Tiny => TINY,
            Size::Small => small,
            Size::SmallMoe => Shape { kind: Kind::Experts { count: 16, used: 4 }, ..small },
            Size::SmallHybrid => {
                Shape { kind: Kind::Hybrid { every: 2, mixer: MIXER, experts: None }, ..small }
            }
            Size::SmallGranite => {
                let kind = Kind::Hybrid { every: 2, mixer: MIXER, experts: Some(FEW) };
                Shape { kind, ..small }
            }
            Size::SmallNemotron => {
                let mixer = Mixer { groups: 2, ..MIXER };
                let kind = Kind::Blocks { layers: "ME*E", mixer, experts: FEW };
                Shape { layers: 4, kind, ..small }
            }
            Size::SmallDelta => Shape {
                head_dim: 256,
                kind: Kind::Delta { every: 2, key_heads: 2, value_heads: 4, state: 64 },
                ..small
            },
            Size::SmallGemma4 => {
                let kind =
                    Kind::Gemma { every: 2, global_dim: 512, window: 64, shared: 2, input: 64 };
                Shape { layers: 4, width: 512, kind, ..small }
            }
            Size::SmallLatent => {
                let latent = Latent { q_rank: 320, rank: 512, nope: 64, rotary: 64, value: 64 };
                let kind = Kind::Latent { latent, count: 8, used: 2, hidden: 256 };
                Shape { kv_heads: 1, width: 512, kind, ..small }
            }
            Size::OneB => one_b,
            Size::OneAndHalfB => qwen2(one_b),
            Size::EightB => Shape {
                layers: 32,
                width: 4096,
                hidden: 14_336,
                head_dim: 128,
                tied: false,
                ..one_b
            },
            Size::SeventyB => {
                Shape { layers: 80, width: 8192, hidden: 28_672, heads: 64, ..Size::EightB.shape() }
            }
            Size::Moe => Shape {
                width: 1024,
                hidden: 512,
                heads: 16,
                kv_heads: 4,
                kind: Kind::Experts { count: 64, used: 8 },
                vocabulary: 32_768,
                ..one_b
            },
            Size::Nano => nano(one_b),
            Size::Nemotron => nemotron(one_b),
            Size::Hybrid => granite(one_b),
            Size::Granite => granite_with_experts(one_b),
            Size::Delta => qwen35(one_b),
            Size::Gemma4 => gemma4(one_b),
            Size::A3b => qwen3_moe(one_b),
            Size::WholeA3b => Shape { layers: 48, vocabulary: 151_936, ..qwen3_moe(one_b) },
            Size::GptOss => gpt_oss(one_b),
            Size::GlmMoe => glm(one_b),
            Size::GlmFlash => glm_flash(one_b),
            Size::BgeLarge => bge_large(one_b),
        }
    }
}

/// Qwen 2.5 1.5B, without biases.
fn qwen2(one_b: Shape) -> Shape {
    Shape {
        layers: 28,
        width: 1536,
        hidden: 8960,
        heads: 12,
        kv_heads: 2,
        head_dim: 128,
        vocabulary: 151_936,
        ..one_b
    }
}

/// Llama 3.2 1B.
const ONE_B: Shape = Shape {
    layers: 16,
    width: 2048,
    hidden: 8192,
    heads: 32,
    kv_heads: 8,
    head_dim: 64,
    vocabulary: 128_256,
    tied: true,
    kind: Kind::Dense,
};

const TINY: Shape = Shape {
    layers: 2,
    width: 256,
    hidden: 512,
    heads: 8,
    kv_heads: 4,
    head_dim: 32,
    vocabulary: 512,
    tied: false,
    ..ONE_B
};

const SMALL: Shape = Shape { heads: 4, kv_heads: 2, head_dim: 64, vocabulary: 8192, ..TINY };

/// Mixers and experts of small models.
const MIXER: Mixer = Mixer { inner: 512, heads: 8, groups: 1, state: 32 };
const FEW: SharingExperts = SharingExperts { count: 16, used: 4, hidden: 256, shared: 512 };

/// Four layers with experts like those of Nemotron 3 Nano.
fn nano(one_b: Shape) -> Shape {
    Shape {
        layers: 4,
        width: 2688,
        hidden: 1856,
        heads: 32,
        kv_heads: 2,
        head_dim: 128,
        kind: Kind::Experts { count: 128, used: 6 },
        vocabulary: 32_768,
        ..one_b
    }
}

/// Nemotron 3 Nano 30B-A3B.
fn nemotron(one_b: Shape) -> Shape {
    let layers = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME";
    let mixer = Mixer { inner: 4096, heads: 64, groups: 8, state: 128 };
    let experts = SharingExperts { count: 128, used: 6, hidden: 1856, shared: 3712 };
    Shape {
        layers: layers.len() as u32,
        kind: Kind::Blocks { layers, mixer, experts },
        vocabulary: 131_072,
        tied: false,
        ..nano(one_b)
    }
}

/// Granite 4.0 H Tiny.
fn granite_with_experts(one_b: Shape) -> Shape {
    let granite = granite(one_b);
    let Kind::Hybrid { every, mixer, .. } = granite.kind else { return granite };
    let experts = SharingExperts { count: 64, used: 6, hidden: 512, shared: 1024 };
    Shape { hidden: 512, kind: Kind::Hybrid { every, mixer, experts: Some(experts) }, ..granite }
}

/// Granite 4.0 H 1B.
fn granite(one_b: Shape) -> Shape {
    Shape {
        layers: 40,
        width: 1536,
        hidden: 4096,
        heads: 12,
        kv_heads: 4,
        head_dim: 128,
        vocabulary: 100_352,
        kind: Kind::Hybrid {
            every: 10,
            mixer: Mixer { inner: 3072, heads: 48, groups: 1, state: 128 },
            experts: None,
        },
        ..one_b
    }
}

/// Qwen 3.5 4B.
fn qwen35(one_b: Shape) -> Shape {
    Shape {
        layers: 32,
        width: 2560,
        hidden: 9216,
        heads: 16,
        kv_heads: 4,
        head_dim: 256,
        vocabulary: 248_320,
        kind: Kind::Delta { every: 4, key_heads: 16, value_heads: 32, state: 128 },
        ..one_b
    }
}

/// Gemma 4 E4B.
fn gemma4(one_b: Shape) -> Shape {
    Shape {
        layers: 42,
        width: 2560,
        hidden: 10_240,
        heads: 8,
        kv_heads: 2,
        head_dim: 256,
        vocabulary: 262_144,
        kind: Kind::Gemma { every: 6, global_dim: 512, window: 512, shared: 18, input: 256 },
        ..one_b
    }
}

/// Qwen 3 30B-A3B, but for the numbers of layers and of tokens.
fn qwen3_moe(one_b: Shape) -> Shape {
    Shape {
        layers: 10,
        hidden: 768,
        kv_heads: 4,
        head_dim: 128,
        vocabulary: 32_768,
        tied: false,
        kind: Kind::Experts { count: 128, used: 8 },
        ..one_b
    }
}

/// GPT-OSS 120B.
fn gpt_oss(one_b: Shape) -> Shape {
    Shape {
        layers: 36,
        width: 2880,
        hidden: 2880,
        heads: 64,
        vocabulary: 201_088,
        tied: false,
        kind: Kind::Sinks { count: 128, used: 4, window: 128 },
        ..one_b
    }
}

/// GLM 4.5 Air, but for the numbers of layers and of tokens.
fn glm(one_b: Shape) -> Shape {
    Shape {
        layers: 3,
        width: 4096,
        hidden: 10_944,
        heads: 96,
        head_dim: 128,
        vocabulary: 32_768,
        tied: false,
        kind: Kind::SharedExpert { count: 128, used: 8, hidden: 1408 },
        ..one_b
    }
}

/// Ten layers of GLM 4.7 Flash.
fn glm_flash(one_b: Shape) -> Shape {
    let latent = Latent { q_rank: 768, rank: 512, nope: 192, rotary: 64, value: 256 };
    Shape {
        layers: 10,
        hidden: 10_240,
        heads: 20,
        kv_heads: 1,
        vocabulary: 32_768,
        tied: false,
        kind: Kind::Latent { latent, count: 64, used: 4, hidden: 1536 },
        ..one_b
    }
}

/// BGE Large.
fn bge_large(one_b: Shape) -> Shape {
    Shape {
        layers: 24,
        width: 1024,
        hidden: 4096,
        heads: 16,
        kv_heads: 16,
        vocabulary: 30_522,
        kind: Kind::Encoder { tokens: 512 },
        ..one_b
    }
}
