//! `stapo model`: describes a model, or converts it to a Hugging Face folder.

use crate::shared::model::Fetch;
use crate::shared::units::{grouped, parse_size, short, size};
use anyhow::{Result, bail};
use serde_json::json;
use stapo_rl::FoundModel;
use stapo_rl::model_files::{
    AttentionBiases, AttentionSpec, Existing, ExportOptions, LayerSpec, ModelConfig, ModelError, Precision,
    Pretrained, QkNorm, RopeScaling, export,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Describes a model, or converts it to a Hugging Face folder.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: ModelCommand,
}

#[derive(clap::Subcommand)]
enum ModelCommand {
    /// Prints family, sizes, parameters, and the memory that running and training take.
    Info(InfoArgs),
    /// Converts GGUF or safetensors to a Hugging Face folder that transformers loads.
    Convert(ConvertArgs),
}

#[derive(clap::Args)]
struct InfoArgs {
    /// A Hugging Face folder, a GGUF file, a run folder (its newest checkpoint), RUN@STEP, builtin, or a name on the
    /// hub such as Qwen/Qwen3-0.6B.
    model: String,
    /// One JSON object, sizes in bytes.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    fetch: Fetch,
}

#[derive(clap::Args)]
struct ConvertArgs {
    /// A Hugging Face folder, a GGUF file, builtin, or a name on the hub.
    input: String,
    /// The folder to create.
    output: PathBuf,
    /// Type of the written weights. Only f32 keeps the exact values of quantised blocks.
    #[arg(long, value_enum, default_value_t = Dtype::Bf16)]
    dtype: Dtype,
    /// Largest file of weights, such as 5GB or 500MB.
    #[arg(long, default_value = "5GB", value_parser = parse_size)]
    max_shard: u64,
    /// Writes one matrix for embedding and head, the more precise of the two: for GGUF files of a tied model whose
    /// quantiser stored two copies.
    #[arg(long)]
    tie_embeddings: bool,
    /// Replaces the output folder if it holds a model.
    #[arg(long)]
    replace: bool,
    #[command(flatten)]
    fetch: Fetch,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Dtype {
    F32,
    Bf16,
    F16,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    match &args.command {
        ModelCommand::Info(args) => describe(args),
        ModelCommand::Convert(args) => convert(args),
    }
}

fn convert(args: &ConvertArgs) -> Result<ExitCode> {
    let found = args.fetch.find(&args.input)?;
    if found.step().is_some() {
        let (run, out) = (&args.input, args.output.display());
        bail!("model {run}: is a run's checkpoint\nhint: stapo export {run} --out {out}");
    }
    let files = found.files()?;
    let mut model = Pretrained::open(&files.path)?;
    if args.tie_embeddings {
        model.tie_embeddings()?;
    }
    if same_folder(&files.path, &args.output) {
        bail!("output {}: is the model being read", args.output.display());
    }
    let options = ExportOptions {
        precision: match args.dtype {
            Dtype::F32 => Precision::F32,
            Dtype::Bf16 => Precision::Bf16,
            Dtype::F16 => Precision::F16,
        },
        max_shard_bytes: args.max_shard,
        existing: if args.replace { Existing::Replace } else { Existing::Refuse },
    };
    let written = export(&args.output, &model.config, &model.companions()?, &options, |spec, out| {
        model.weights.read_f32(&spec.name, &spec.shape, out)
    })
    .map_err(|error| match &error {
        ModelError::Exists { .. } => anyhow::anyhow!("{error}\nhint: --replace overwrites it"),
        _ => error.into(),
    })?;
    println!(
        "{}: {} tensors, {} parameters, {} of {} in {} file{}",
        args.output.display(),
        written.n_tensors,
        grouped(written.n_parameters),
        size(written.bytes),
        options.precision.encoding().name(),
        written.n_shards,
        if written.n_shards == 1 { "" } else { "s" },
    );
    Ok(ExitCode::SUCCESS)
}

fn same_folder(input: &Path, output: &Path) -> bool {
    let folder = if input.is_dir() { Some(input) } else { input.parent() };
    let real = |path: &Path| path.canonicalize().ok();
    real(output).is_some() && folder.and_then(real) == real(output)
}

fn describe(args: &InfoArgs) -> Result<ExitCode> {
    let found = args.fetch.find(&args.model)?;
    let files = found.files()?;
    let model = Pretrained::open(&files.path)?;
    if args.json {
        println!("{:#}", as_json(&found, &model));
    } else {
        print_lines(&found, &model);
    }
    Ok(ExitCode::SUCCESS)
}

/// Bytes by encoding, over the tensors that the model uses.
fn stored(model: &Pretrained) -> BTreeMap<&'static str, u64> {
    let mut by_encoding = BTreeMap::new();
    for spec in model.config.tensors() {
        let encoding = model.weights.encoding(&spec.name);
        if let Some((encoding, bytes)) = encoding.zip(model.weights.stored_bytes(&spec.name)) {
            *by_encoding.entry(encoding.name()).or_insert(0) += bytes as u64;
        }
    }
    by_encoding
}

fn as_json(found: &FoundModel, model: &Pretrained) -> serde_json::Value {
    let config = &model.config;
    let n = config.n_parameters();
    // The keys of layers are null where layers differ in them.
    let heads = same(config.attentions().map(|attention| attention.heads));
    json!({
        "path": found.pinned.to_string(),
        "step": found.step(),
        "format": model.format(),
        "family": config.family.name(),
        "architecture": config.architecture(),
        "parameters": n,
        "layers": config.layers.len(),
        "width": config.width,
        "heads": heads.map(|heads| heads.query),
        "kv_heads": heads.map(|heads| heads.kv),
        "head_dim": heads.map(|heads| heads.dim),
        "ffn_width": shared(config, LayerSpec::ffn_width),
        "vocabulary": config.vocabulary,
        "max_positions": config.max_positions,
        "tied_embeddings": config.tied_embeddings,
        "qk_norm": same(config.attentions().map(|attention| attention.qk_norm != QkNorm::Absent)),
        "qkv_bias": same(config.attentions().map(|attention| attention.biases != AttentionBiases::Absent)),
        "parts": config.parts().iter().map(ToString::to_string).collect::<Vec<_>>(),
        "norm_eps": config.norm_eps,
        "rope": same(config.attentions().map(|attention| attention.rope.clone()))
            .map(|rope| json!({ "theta": rope.theta, "kind": rope_name(&rope.scaling) })),
        "bos": config.bos,
        "stops": config.stops,
        "stored_bytes": stored(model),
        "ignored_tensors": model.ignored,
        "bytes": {
            "weights_f32": 4 * n,
            "weights_bf16": 2 * n,
            "training_f32": TRAINING_BYTES * n,
            "kv_per_token_f32": 4 * config.kv_numbers_per_token(),
            "kv_per_token_bf16": 2 * config.kv_numbers_per_token(),
        },
    })
}

/// Bytes per parameter: f32 weight, gradient, and Adam's two moments.
const TRAINING_BYTES: u64 = 16;

fn print_lines(found: &FoundModel, model: &Pretrained) {
    let config = &model.config;
    let n = config.n_parameters();
    let kv = config.kv_numbers_per_token();
    let files: Vec<_> =
        stored(model).iter().map(|(name, bytes)| format!("{name} {}", size(*bytes))).collect();
    let embeddings = match config.score {
        Some(_) => "head of a reward model",
        None if config.tied_embeddings => "head tied to embedding",
        None => "separate head",
    };
    let format = match found.step() {
        Some(step) => format!("checkpoint of step {step}, trained from {}", model.format()),
        None => model.format().to_string(),
    };
    let ids = |ids: &[u32]| ids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    let parts: Vec<String> = config.parts().iter().map(ToString::to_string).collect();
    let mut lines = vec![
        ("model", format!("{} ({format})", found.pinned)),
        ("family", format!("{} ({})", config.family.name(), config.architecture())),
        ("parameters", format!("{} ({})", grouped(n), short(n))),
        ("layers", layers(config)),
        ("attention", attention(config)),
        ("parts", if parts.is_empty() { "those of Llama".into() } else { parts.join(", ") }),
        ("vocabulary", format!("{}, {embeddings}", grouped(config.vocabulary as u64))),
        ("positions", format!("{}{}", grouped(config.max_positions as u64), rope(config))),
        ("stop tokens", if config.stops.is_empty() { "none".into() } else { ids(&config.stops) }),
        ("stored as", files.join(", ")),
        ("weights", format!("{} in f32, {} in bf16", size(4 * n), size(2 * n))),
        (
            "training",
            format!(
                "{} in f32 (weights, gradients, two Adam states; activations apart)",
                size(TRAINING_BYTES * n)
            ),
        ),
        ("KV cache", format!("{} a token in f32, {} in bf16", size(4 * kv), size(2 * kv))),
    ];
    if !model.ignored.is_empty() {
        lines.push(("ignored", model.ignored.join(", ")));
    }
    for (name, value) in lines {
        println!("{name:<12} {value}");
    }
}

const DIFFERENT: &str = "differs between layers";

/// What all layers have; `None` if layers differ in it.
fn shared<T: PartialEq>(config: &ModelConfig, of_layer: impl Fn(&LayerSpec) -> T) -> Option<T> {
    same(config.layers.iter().map(of_layer))
}

/// The one value of all; `None` if values differ.
fn same<T: PartialEq>(mut values: impl Iterator<Item = T>) -> Option<T> {
    let first = values.next()?;
    values.all(|value| value == first).then_some(first)
}

fn layers(config: &ModelConfig) -> String {
    let ffn = shared(config, LayerSpec::ffn_width).map_or(DIFFERENT.into(), |width| width.to_string());
    format!("{} of width {}, feed-forward {ffn}", config.layers.len(), config.width)
}

fn attention(config: &ModelConfig) -> String {
    let Some(heads) = same(config.attentions().map(|attention| attention.heads)) else {
        return DIFFERENT.into();
    };
    format!("{} heads on {} key-value heads of {}", heads.query, heads.kv, heads.dim)
}

fn rope(config: &ModelConfig) -> String {
    let mut kinds = Vec::new();
    for AttentionSpec { rope, .. } in config.attentions() {
        let kind = format!("rope {} theta {}", rope_name(&rope.scaling), rope.theta);
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    format!(", {}", kinds.join(" and "))
}

fn rope_name(kind: &RopeScaling) -> &'static str {
    match kind {
        RopeScaling::None => "default",
        RopeScaling::Linear { .. } => "linear",
        RopeScaling::Llama3 { .. } => "llama3",
        RopeScaling::Yarn { .. } => "yarn",
        RopeScaling::Long { .. } => "longrope",
    }
}
