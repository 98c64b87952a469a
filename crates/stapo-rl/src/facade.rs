//! The items of `stapo-model` that the command line uses, by name. `stapo-cli` may not import `stapo-model` or
//! `stapo-ops`, so an item that is not listed here is out of the command line's reach.

/// Devices: what the machine has, how a device is opened, and how a failing GPU is reported.
pub mod device {
    pub use stapo_model::{CpuOptions, Device, DeviceName, Simd};

    /// NVIDIA GPUs.
    pub mod cuda {
        pub use stapo_model::cuda::{
            CudaOptions, Found, FoundLibrary, Gpu, Training, guard, is_failing, probe,
        };
    }
}

/// Models on disk: opening a Hugging Face folder or a GGUF file, and writing a Hugging Face folder.
pub mod model_files {
    pub use stapo_model::config::{AttentionBiases, AttentionSpec, QkNorm};
    pub use stapo_model::decoder::QuantisedBase;
    pub use stapo_model::export::{Existing, ExportOptions, Precision, export};
    pub use stapo_model::peft::write as write_adapter;
    pub use stapo_model::{Error as ModelError, LayerSpec, ModelConfig, Pretrained, RopeScaling};
}

/// Reading files that are not trusted; a panic of a thread with that name is reported as an error.
pub mod untrusted {
    pub use stapo_model::files::{read_lines, read_text};
    pub use stapo_model::untrusted::THREAD_NAME;
}

/// Models in memory: generation, and scoring of given tokens.
pub mod inference {
    pub use stapo_model::decoder::{HeadOptions, PackedBatch, Pass, TokenScores};
    pub use stapo_model::generate::{
        Completion, Engine, EngineMemory, EngineSettings, Event, Filter, Request, SampledToken, SamplingRule,
        StopTexts, Ticket,
    };
    pub use stapo_model::{Message, ScoreHead};
}
