//! The identity of a run: hashes of every file that its bits depend on.

use crate::error::Result;
use crate::learn::pretrain::{PretrainConfig, TextsSpec};
use crate::plan::config::{LoraConfig, ModelSource, Plan, RolloutSourceSpec, TeacherSource};
use crate::policy::hashes::{of_adapter, of_source};
use crate::ranks::Fact;
use crate::reward::{CommandSpec, VerifierSpec, fingerprint};
use crate::run::{hash_file, plan_values};
use crate::tasks::{DataFile, DataPath, EnvironmentSpec, TaskError, TaskSpec};
use stapo_core::record::{FileHash, Identity};
use stapo_model::DeviceName;
use std::path::PathBuf;

/// The identity of a training run.
pub fn of_plan(plan: &Plan, program: &str) -> Result<Identity> {
    let mut inputs = of_source(&plan.config.model)?;
    inputs.extend(of_lora(plan.config.lora.as_ref())?);
    let teacher = plan.config.teacher.as_ref().and_then(TeacherSource::model);
    for (role, source) in [("reference", plan.config.reference.as_ref()), ("teacher", teacher.as_ref())] {
        let hashes = source.map_or(Ok(Vec::new()), of_source)?.into_iter();
        inputs.extend(hashes.map(|input| FileHash { name: format!("{role} {}", input.name), ..input }));
    }
    inputs.extend(of_task(&plan.task)?);
    for reward in plan.rewards.iter().skip(1) {
        inputs.extend(of_verifier(&format!("verifier of {}", reward.name), &reward.verifier)?);
    }
    for (name, command) in plan.config.environment.iter().flat_map(EnvironmentSpec::programs) {
        inputs.push(of_program(&name, &command)?);
    }
    if let Some(RolloutSourceSpec::Jsonl { path, .. }) = &plan.config.rollout.source {
        inputs.push(hash_file("rollouts", path)?);
    }
    Ok(Identity { program: program.to_string(), device: String::new(), inputs })
}

/// What ranks compare before they open a model: the program, and every key of the plan. The number of a GPU may differ.
pub fn facts_of_plan(plan: &Plan, program: &str) -> Vec<Fact> {
    let keys = plan_values(&plan.to_toml()).into_iter().map(|(key, value)| {
        let value = if key == "device" { device_kind(plan.device()) } else { value };
        (format!("plan key {key}"), value)
    });
    std::iter::once(("program".to_string(), program.to_string())).chain(keys).collect()
}

/// The identity of a supervised run.
pub fn of_pretraining(config: &PretrainConfig, program: &str) -> Result<Identity> {
    let mut inputs = config.model.source().map_or(Ok(Vec::new()), |source| of_source(&source))?;
    inputs.extend(of_lora(config.lora.as_ref())?);
    inputs.extend(of_texts("data", &config.data)?);
    Ok(Identity { program: program.to_string(), device: device_kind(config.device()), inputs })
}

/// The hashes of the adapter that a run starts from.
fn of_lora(lora: Option<&LoraConfig>) -> Result<Vec<FileHash>> {
    of_adapter(lora.and_then(|lora| lora.adapter.as_deref()))
}

/// `cpu` or `cuda`: the number of a GPU changes no bit.
pub fn device_kind(device: DeviceName) -> String {
    match device {
        DeviceName::Cpu => "cpu".to_string(),
        DeviceName::Cuda { .. } => "cuda".to_string(),
    }
}

fn of_texts(name: &str, texts: &TextsSpec) -> Result<Vec<FileHash>> {
    match texts {
        TextsSpec::Solutions { task, .. } | TextsSpec::SolutionPairs { task, .. } => {
            let task =
                TaskSpec::read("data.task", task.clone()).map_err(crate::plan::config::PlanError::from)?;
            of_task(&task)
        }
        TextsSpec::Jsonl(file) | TextsSpec::Parquet(file) | TextsSpec::File(file) => {
            hash_files(name, &file.path)
        }
        TextsSpec::Rollouts(recorded) => {
            let hash = |file: &PathBuf| {
                let file_name = file.file_name().unwrap_or_default().to_string_lossy();
                hash_file(&format!("{name} {file_name}"), file)
            };
            recorded.files()?.iter().map(hash).collect()
        }
        TextsSpec::Mixture { parts } => {
            let parts = parts.iter().enumerate();
            let hashes = parts.map(|(idx, part)| of_texts(&format!("{name} {}", idx + 1), &part.texts));
            Ok(hashes.collect::<Result<Vec<_>>>()?.concat())
        }
    }
}

/// The hashes of the files that `path` stands for. A single file has the name alone, several have their number after it.
fn hash_files(name: &str, path: &DataPath) -> Result<Vec<FileHash>> {
    let files = path.files()?;
    let hash = |(idx, file): (usize, &DataFile)| {
        let name = if files.len() == 1 { name.to_string() } else { format!("{name} file {}", idx + 1) };
        hash_file(&name, &file.path)
    };
    files.iter().enumerate().map(hash).collect()
}

/// The hashes of a task's data and of its verifier's program.
pub fn of_task(task: &TaskSpec) -> Result<Vec<FileHash>> {
    let mut inputs = Vec::new();
    if let Some(rows) = task.rows() {
        inputs.extend(hash_files("data", &rows.path)?);
    }
    inputs.extend(of_verifier("verifier", task.verifier())?);
    Ok(inputs)
}

/// The hashes of a verifier's program, or of the files of its model; none for a rule.
pub fn of_verifier(name: &str, verifier: &VerifierSpec) -> Result<Vec<FileHash>> {
    if let Some((role, model)) = verifier.model() {
        let mut files = of_source(&ModelSource::named(model))?;
        files.extend(of_adapter(verifier.judge().and_then(|judge| judge.adapter.as_deref()))?);
        let named = |file: FileHash| FileHash { name: format!("{role} {}", file.name), ..file };
        return Ok(files.into_iter().map(named).collect());
    }
    let program = verifier.program();
    program.iter().map(|command| hash_program(name, "verifier.program", command)).collect()
}

/// The hash of a program of an environment and its settings.
pub fn of_program(name: &str, command: &CommandSpec) -> Result<FileHash> {
    hash_program(name, "environment", command)
}

/// The hash of a program and its settings; `key` is that of the config.
fn hash_program(name: &str, key: &str, command: &CommandSpec) -> Result<FileHash> {
    let sha256 = fingerprint(command).map_err(|error| TaskError::Verifier {
        program: command.program.display().to_string(),
        place: format!("program of the {name}"),
        problem: error.to_string(),
        remedy: format!("{key}: a path to an executable file, or a name on the PATH"),
    })?;
    Ok(FileHash { name: name.to_string(), n_bytes: 0, sha256 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::config::Config;

    fn plan(set: &[&str]) -> Plan {
        Plan::resolve(Config::from_toml("", set.iter().copied()).unwrap()).unwrap()
    }

    #[test]
    fn ranks_agree_on_every_key_but_the_number_of_their_gpu() {
        let facts = |set: &[&str]| facts_of_plan(&plan(set), "1");
        assert_eq!(facts(&["device=cuda:1"]), facts(&["device=cuda:0"]));
        let cuda = facts(&["device=cuda"]);
        assert_ne!(facts(&[]), cuda);
        for other in ["seed=1", "steps=81", "rollout.kv_mib=64", "update.weight_decay=0.2"] {
            let found = facts(&["device=cuda", other]);
            let differ: Vec<&Fact> = found.iter().filter(|fact| !cuda.contains(fact)).collect();
            let key = format!("plan key {}", other.split('=').next().unwrap());
            assert_eq!(differ.iter().map(|(name, _)| name).collect::<Vec<_>>(), [&key], "{other}");
        }
        assert_ne!(facts_of_plan(&plan(&["device=cuda"]), "2"), cuda);
    }

    #[test]
    fn a_run_depends_on_every_file_that_its_plan_names() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, format!("{{\"problem\": \"{name}\", \"answer\": \"1\"}}\n")).unwrap();
            path.display().to_string()
        };
        let (rows, more, rollouts) = (file("rows.jsonl"), file("more.jsonl"), file("rollouts.jsonl"));
        let names = |set: &[&str]| -> Vec<String> {
            let inputs = of_plan(&plan(set), "1").unwrap().inputs;
            inputs.into_iter().map(|input| input.name).collect()
        };
        let of_model = names(&[]);
        assert!(of_model.contains(&"weights".to_string()), "{of_model:?}");
        let added = |set: &[&str]| -> Vec<String> {
            names(set).into_iter().filter(|name| !of_model.contains(name)).collect()
        };
        assert_eq!(added(&[&format!("task={{kind=\"jsonl\",path={rows:?}}}")]), ["data"]);
        let two = format!("task={{kind=\"file\",path=[{rows:?},{more:?}]}}");
        assert_eq!(added(&[&two]), ["data file 1", "data file 2"]);
        let source = format!("rollout.source={{kind=\"jsonl\",path={rollouts:?}}}");
        assert_eq!(added(&[&source]), ["rollouts"]);
        let kl = ["objective.kl={kind=\"k3\",beta=0.1}", "reference=builtin"];
        let prefixed = |role: &str| of_model.iter().map(|name| format!("{role} {name}")).collect::<Vec<_>>();
        assert_eq!(added(&kl), prefixed("reference"));
        let dasd = ["objective.distillation={kind=\"dasd\"}", "teacher=builtin"];
        assert_eq!(added(&dasd), prefixed("teacher"));
        let judge = "task.verifier={kind=\"judge\",model=\"builtin\"}";
        assert_eq!(added(&[judge]), prefixed("judge"));
        let second = "rewards=[{name=\"a\"},{name=\"b\",verifier={kind=\"command\",program=\"sh\"}}]";
        assert_eq!(added(&[second]), ["verifier of b"]);
        let tools = "environment={kind=\"tools\",tools=[{kind=\"calculator\"},{kind=\"command\",name=\"t\",description=\"d\",program=\"sh\"}]}";
        assert_eq!(added(&[tools]), ["tool 2"]);
    }
}
