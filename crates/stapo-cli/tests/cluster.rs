//! The files of `examples/cluster`, as far as they can be checked without a cluster; `bench/cluster.sh` runs two of them.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn cluster() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/cluster")
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

#[test]
fn scripts_are_bash() {
    for name in ["rank.sh", "slurm.sh"] {
        run(Command::new("bash").arg("-n").arg(cluster().join(name)));
    }
}

/// A program that prints its arguments stands in for `stapo`.
#[test]
fn a_rank_begins_a_run_and_goes_on_with_one_that_exists() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let program = at.join("says");
    std::fs::write(&program, "#!/usr/bin/env bash\necho \"$@\"\n").unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let said = || {
        let mut command = Command::new("bash");
        command.arg(cluster().join("rank.sh")).args(["runs/a", "my.toml", "--set", "steps=3"]);
        let output = run(command.current_dir(at).env("STAPO", &program));
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(said(), "train my.toml --set steps=3 --out runs/a\n");
    std::fs::create_dir_all(at.join("runs/a")).unwrap();
    assert_eq!(said(), "train --resume runs/a\n");
}

/// The values of a key in a YAML file, in order, without quotes.
fn values(yaml: &str, key: &str) -> Vec<String> {
    let of_line = |line: &str| {
        let line = line.trim().trim_start_matches("- ");
        let value = line.strip_prefix(key)?.strip_prefix(':')?.trim();
        Some(value.trim_matches('"').to_string())
    };
    yaml.lines().filter_map(of_line).collect()
}

#[test]
fn the_ranks_of_the_kubernetes_job_agree_on_their_number_and_on_where_to_meet() {
    let yaml = std::fs::read_to_string(cluster().join("kubernetes.yaml")).unwrap();
    let variable = |name: &str| {
        let after = yaml.split(&format!("- name: {name}\n")).nth(1).unwrap();
        values(after, "value").remove(0)
    };
    let n_ranks = variable("WORLD_SIZE");
    assert_eq!(
        (values(&yaml, "completions"), values(&yaml, "parallelism")),
        (vec![n_ranks.clone()], vec![n_ranks])
    );
    assert_eq!(values(&yaml, "completionMode"), ["Indexed"]);
    // A pod of an indexed job is reached as JOB-INDEX.SUBDOMAIN where a headless service has the subdomain's name.
    let names = values(&yaml, "name");
    let (service, job) = (&names[0], &names[1]);
    assert_eq!(&values(&yaml, "subdomain")[0], service);
    assert_eq!(variable("MASTER_ADDR"), format!("{job}-0.{service}"));
    assert_eq!(&values(&yaml, "job-name")[0], job);
    assert_eq!(values(&yaml, "clusterIP"), ["None"]);
    assert!(yaml.contains("- name: STAPO_RANKS_TOKEN\n"));
}

#[test]
fn the_program_for_ray_is_python() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new("python3");
    command.args(["-c", "import ast, sys; ast.parse(open(sys.argv[1]).read())"]);
    command.arg(cluster().join("ray_train.py")).current_dir(folder.path());
    match command.output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => println!("skipped: python3 does not start: {error}"),
    }
}

/// What `stapo doctor` says, with these variables and none of a launcher that runs the tests.
fn doctor(args: &[&str], variables: &[(&str, &str)]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    command.current_dir(folder.path()).arg("doctor").args(args);
    for name in
        ["RANK", "WORLD_SIZE", "SLURM_PROCID", "JOB_COMPLETION_INDEX", "PMI_RANK", "OMPI_COMM_WORLD_RANK"]
    {
        command.env_remove(name);
    }
    String::from_utf8(run(command.envs(variables.iter().copied())).stdout).unwrap()
}

#[test]
fn doctor_says_what_the_environment_makes_of_a_process() {
    assert!(doctor(&[], &[]).contains("a process here trains alone"));
    let job = [
        ("JOB_COMPLETION_INDEX", "2"),
        ("WORLD_SIZE", "8"),
        ("MASTER_ADDR", "stapo-0.stapo"),
        ("MASTER_PORT", "29577"),
    ];
    let text = doctor(&[], &job);
    assert!(text.contains("2 of 8") && text.contains("stapo-0.stapo:29577"), "{text}");
    assert!(text.contains("whoever reaches that port can join"), "{text}");
    let with_token = [&job[..], &[("STAPO_RANKS_TOKEN", "secret")]].concat();
    let json: serde_json::Value = serde_json::from_str(&doctor(&["--json"], &with_token)).unwrap();
    assert_eq!((&json["rank"]["rank"], &json["rank"]["has_token"]), (&2.into(), &true.into()));
    assert!(!json.to_string().contains("secret"), "{json}");
    let half = doctor(&[], &job[..2]);
    assert!(half.contains("look") && half.contains("MASTER_ADDR"), "{half}");
}
