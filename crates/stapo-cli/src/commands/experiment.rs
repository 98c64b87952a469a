//! `stapo experiment`

mod child;
mod folder;
mod minutes;
mod power;
mod show;

use crate::shared::clock::span;
use crate::shared::option::positive;
use crate::shared::program::PROGRAM;
use crate::shared::run_status::has_ended;
use crate::shared::stop::{self, Stop};
use crate::shared::{run_folder, shipped};
use anyhow::{Context, Result, bail};
use child::{Finished, Job, Leashes};
use minutes::TimeLimit;
use stapo_core::record::{Arm, Experiment, Metrics, Record};
use stapo_rl::lab::evaluation::open_benchmarks;
use stapo_rl::lab::experiment::{ArmRuns, ExperimentSpec, ExperimentSummary, SeedRun, split_arm, summarise};
use stapo_rl::plan::config::ModelSource;
use stapo_rl::reward::Programs;
use stapo_rl::run::disk::write_whole;
use stapo_rl::run::{Run, describe_writer, hash_bytes, holder, read_events, receipt};
use stapo_rl::tasks::Task;
use stapo_rl::{Config, Plan};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Runs a matrix of training runs from one file: arms x seeds x settings, everything else equal.
///
/// Run the same command again to continue: finished runs are kept, and interrupted ones are resumed. If an arm fails, the
/// output names it and the other arms still run. All arms of a seed run before the next seed. Seeds and arms may be added
/// later. Without a file it lists the shipped experiments.
#[derive(clap::Args)]
pub struct Args {
    /// A TOML file, or the name of a shipped experiment.
    file: Option<String>,

    /// The folder for all runs; by default experiments/NAME.
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Changes a value for all arms, as in steps=20; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// Seeds instead of the file's; those that the folder already has keep their runs.
    #[arg(long, value_delimiter = ',')]
    seeds: Option<Vec<u64>>,

    /// Runs only the arm of this name, or all whose name holds this text, as in learning_rate=0.0003; may be repeated. The
    /// others keep what they have.
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,

    /// How many runs to train at the same time; they share the threads.
    #[arg(long, default_value_t = 1, value_parser = positive)]
    jobs: usize,

    /// Ends within N minutes: no run starts that would not end in time, by the pace of the other runs or by `stapo plan`.
    #[arg(long, value_name = "N", value_parser = positive)]
    minutes: Option<usize>,

    /// Prints the difference that the seeds and questions can detect, and starts no run.
    #[arg(long)]
    power: bool,

    /// The summary as JSON on standard output.
    #[arg(long)]
    json: bool,

    /// Checks and lists the runs with their settings, and starts none. Warns of data that cannot be opened.
    #[arg(long)]
    dry_run: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let Some(file) = &args.file else {
        shipped::print(&shipped::EXPERIMENTS);
        return Ok(ExitCode::SUCCESS);
    };
    let spec = read_spec(file, args)?;
    let asked = spec.expand()?;
    let chosen_of_asked = chosen(&asked, &spec.seeds, &args.only)?;
    if args.dry_run {
        let arms: Vec<&Arm> = chosen_of_asked.iter().map(|&place| &asked.arms[place]).collect();
        show::planned(arms.iter().copied());
        warn_of_inputs(&spec, &arms)?;
        return Ok(ExitCode::SUCCESS);
    }
    let folder = args.out.clone().unwrap_or_else(|| Path::new("experiments").join(&asked.name));
    if args.power {
        return print_power(&folder, &spec, &asked);
    }
    let stop = stop::on_signals()?;
    // Held to the end: a second process on this folder is refused.
    let (lock, mut experiment) = folder::prepare(&folder, &spec, asked)?;
    let chosen = chosen(&experiment, &spec.seeds, &args.only)?;
    if let Some(text) = lock.warning() {
        eprintln!("warning: {text}");
    }
    wait_for_runs(&folder, &experiment)?;
    let limit = args.minutes.map(|minutes| TimeLimit {
        until: Instant::now() + Duration::from_secs(60 * minutes as u64),
        experiment: &experiment,
        jobs: args.jobs,
    });
    let Outcome { failures, n_stopped, left } =
        run_arms(&folder, &experiment, &chosen, args.jobs, &stop, limit.as_ref());
    for &place in &chosen {
        experiment.arms[place].error = None;
    }
    for (arm, error) in failures {
        experiment.arms[arm].error = Some(error);
    }
    write_whole(&folder.join("experiment.json"), experiment.to_line().as_bytes())?;
    if stop.is_raised() {
        let sealed = seal(&folder, &spec, &experiment)?;
        let (receipt, at) = (receipt::short(&sealed), folder.display());
        eprintln!(
            "stopped; run the same command again to continue\nreceipt {receipt} of what is there: stapo verify {at}"
        );
        return Ok(ExitCode::from(stop.exit_status()));
    }
    let summary = summary(&folder, &experiment)?;
    let text = serde_json::to_string_pretty(&summary.arms)?;
    write_whole(&folder.join("summary.json"), format!("{text}\n").as_bytes())?;
    let sealed = seal(&folder, &spec, &experiment)?;
    if args.json {
        println!("{text}");
    } else {
        show::summary(&experiment, &summary);
        let at = folder.display();
        println!("\nruns: {at}\nreport: stapo report {at}");
        println!("receipt {}: stapo verify {at}", receipt::short(&sealed));
    }
    print_unfinished(&folder, &experiment);
    print_left(left.iter().map(|&(place, needed)| (experiment.arms[place].run.as_str(), needed)));
    let any_failed = n_stopped > 0 || experiment.arms.iter().any(|arm| arm.error.is_some());
    Ok(if any_failed { ExitCode::from(1) } else { ExitCode::SUCCESS })
}

/// Names the runs that have steps and are in no summary, since they have not come to their end.
fn print_unfinished(folder: &Path, experiment: &Experiment) {
    for arm in experiment.arms.iter().filter(|arm| arm.error.is_none()) {
        if let Some(run) = StartedRun::read(folder, arm).filter(|run| !run.has_ended) {
            let (n_steps, steps) = (run.metrics.len(), run.config.steps);
            eprintln!("unfinished, and not in the summary: {}, {n_steps} of {steps} steps", arm.run);
        }
    }
}

/// Opens the data and benchmarks of the arms and looks for their models, and warns once of what no run could open here.
fn warn_of_inputs(spec: &ExperimentSpec, arms: &[&Arm]) -> Result<()> {
    let config_text = spec.config_text();
    let (mut opened, mut warnings) = (Vec::new(), Vec::new());
    for arm in arms {
        let set = arm.settings.iter().map(String::as_str);
        let mut plan = Plan::resolve(Config::from_toml(&config_text, set)?)?;
        let Config { model, reference, teacher, rollout, evaluation, .. } = plan.config.clone();
        let inputs = (plan.task.clone(), evaluation, model, reference, teacher, rollout.draft);
        if opened.contains(&inputs) {
            continue;
        }
        opened.push(inputs);
        let pinned: stapo_rl::Result<()> = plan.pin_models(ModelSource::find);
        let texts = [
            Task::open_with(&plan.task, Programs::Never).err().map(|error| error.to_string()),
            open_benchmarks(&plan, Programs::Never).err().map(|error| error.to_string()),
            pinned.err().map(|error| error.to_string()),
        ];
        for text in texts.into_iter().flatten() {
            if !warnings.contains(&text) {
                eprintln!("warning: {}: {text}", arm.run);
                warnings.push(text);
            }
        }
    }
    Ok(())
}

/// Names the runs that did not start, with the time that each needs.
fn print_left<'a>(runs: impl Iterator<Item = (&'a str, Duration)>) {
    let runs: Vec<String> = runs.map(|(run, needed)| format!("{run} (about {})", span(needed))).collect();
    if !runs.is_empty() {
        let n = runs.len();
        eprintln!(
            "{n} run{} left, which would not have ended in time: {}; run the same command again to continue",
            if n == 1 { "" } else { "s" },
            runs.join(", ")
        );
    }
}

/// Writes the manifest of the experiment, which lists every run that has ended or was stopped by that run's own manifest.
fn seal(folder: &Path, spec: &ExperimentSpec, experiment: &Experiment) -> Result<String> {
    let inputs = vec![hash_bytes("config", spec.config_text().as_bytes())];
    let runs: Vec<String> = experiment.arms.iter().map(|arm| arm.run.clone()).collect();
    Ok(receipt::seal(folder, &receipt::plain_manifest(inputs, PROGRAM, ""), &runs, &[])?)
}

fn read_spec(file: &str, args: &Args) -> Result<ExperimentSpec> {
    let text = shipped::read("experiment", Path::new(file), &shipped::EXPERIMENTS)?;
    let mut spec = ExperimentSpec::from_toml(&text).with_context(|| file.to_string())?;
    spec.overrides.clone_from(&args.set);
    spec.seeds = args.seeds.clone().unwrap_or(spec.seeds);
    Ok(spec)
}

/// How long a run of an experiment that was killed may take to notice it.
const LAST_MOMENTS: Duration = Duration::from_secs(10);

/// Waits for runs that another process still writes, and refuses the experiment where one continues.
fn wait_for_runs(folder: &Path, experiment: &Experiment) -> Result<()> {
    let until = Instant::now() + LAST_MOMENTS;
    for arm in &experiment.arms {
        let run = folder.join(&arm.run);
        while let Some(writer) = holder(&run) {
            if until.saturating_duration_since(Instant::now()).is_zero() {
                let by = describe_writer(&writer);
                bail!(stapo_rl::Error::Locked { folder: run, by });
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    Ok(())
}

/// The arms to run in their order: all of the first seed, then all of the next, so that an experiment that is stopped has
/// compared them all.
fn chosen(experiment: &Experiment, seeds: &[u64], only: &[String]) -> Result<Vec<usize>> {
    let arms = &experiment.arms;
    let mut is_chosen = vec![only.is_empty(); arms.len()];
    for text in only {
        // `justrl` is the arm of that name under every setting, and not `justrl-kl`.
        let is_named = |arm: &Arm| arm.name == *text || split_arm(&arm.name).0 == text;
        let is_whole = arms.iter().any(is_named);
        let holds = |arm: &Arm| if is_whole { is_named(arm) } else { arm.name.contains(text) };
        if !arms.iter().any(holds) {
            bail!(
                "--only {text}: no arm has that in its name\nhint: the arms are {}",
                experiment.arm_names().join(", ")
            );
        }
        is_chosen.iter_mut().zip(arms).for_each(|(is_chosen, arm)| *is_chosen |= holds(arm));
    }
    let of_seed = |&seed: &u64| (0..arms.len()).filter(move |&place| arms[place].seed == seed);
    Ok(seeds.iter().flat_map(of_seed).filter(|&place| is_chosen[place]).collect())
}

/// What became of the chosen arms that have not ended well.
#[derive(Default)]
struct Outcome {
    failures: Vec<(usize, String)>,
    /// Arms that a signal of their own stopped.
    n_stopped: usize,
    /// Arms that did not start, since they would not have ended in time, with the time that they need.
    left: Vec<(usize, Duration)>,
}

/// Runs every chosen arm that is not finished.
fn run_arms(
    folder: &Path,
    experiment: &Experiment,
    chosen: &[usize],
    jobs: usize,
    stop: &Stop,
    limit: Option<&TimeLimit>,
) -> Outcome {
    let threads = threads_of_run(std::thread::available_parallelism().map_or(1, usize::from), jobs);
    let next = Mutex::new(chosen.iter().copied());
    let outcome = Mutex::new(Outcome::default());
    let view = show::Progress::new(chosen.len());
    let leashes = Leashes::default();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| pass_on(stop, &leashes, &is_over));
        let worker = || {
            loop {
                let Some(place) = next.lock().ok().and_then(|mut places| places.next()) else { return };
                let arm = &experiment.arms[place];
                let job = Job { folder, arm, threads, leashes: &leashes, limit };
                let finished = job.run(&view);
                match finished {
                    Ok(Finished::Done) => view.done(arm),
                    Ok(Finished::Stopped) if is_stopping(stop) => return,
                    Ok(Finished::Stopped) => {
                        view.stopped(arm);
                        if let Ok(mut outcome) = outcome.lock() {
                            outcome.n_stopped += 1;
                        }
                    }
                    Ok(Finished::Left(needed)) => {
                        if let Ok(mut outcome) = outcome.lock() {
                            outcome.left.push((place, needed));
                        }
                    }
                    Err(error) => {
                        view.failed(arm, &error);
                        if let Ok(mut outcome) = outcome.lock() {
                            outcome.failures.push((place, format!("{error:#}")));
                        }
                    }
                }
                if stop.is_raised() {
                    return;
                }
            }
        };
        let workers: Vec<_> = (0..jobs.max(1)).map(|_| scope.spawn(worker)).collect();
        for worker in workers {
            let _ = worker.join();
        }
        is_over.store(true, Ordering::SeqCst);
    });
    view.finish();
    outcome.into_inner().unwrap_or_default()
}

/// Whether the experiment itself is asked to stop: a terminal's signal may end a run before this process has heard it.
fn is_stopping(stop: &Stop) -> bool {
    let hears = || {
        std::thread::sleep(Duration::from_millis(50));
        stop.is_raised()
    };
    stop.is_raised() || (0..10).any(|_| hears())
}

/// The threads of each of several runs at the same time.
fn threads_of_run(n_cores: usize, jobs: usize) -> usize {
    n_cores.div_ceil(jobs.max(1))
}

/// Hands a signal on to the runs until all have ended: one of a terminal reaches them by itself, another only this process.
fn pass_on(stop: &Stop, leashes: &Leashes, is_over: &AtomicBool) {
    while !is_over.load(Ordering::SeqCst) {
        if stop.is_raised() {
            leashes.stop(stop.signal());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The summary of the runs that came to their end; the first arm is the method where none is named.
fn summary(folder: &Path, experiment: &Experiment) -> Result<ExperimentSummary> {
    let finished = finished_runs(folder, experiment);
    let mut arms = by_arm(experiment, &finished);
    let method = experiment.method.as_deref().or(arms.first().map(|arm| split_arm(arm.name).0));
    arms.retain(|arm| !arm.runs.is_empty());
    Ok(summarise(&arms, method, experiment.reach.as_deref())?)
}

/// Prints what the experiment can detect, by its seeds and the questions of its first arm.
fn print_power(folder: &Path, spec: &ExperimentSpec, experiment: &Experiment) -> Result<ExitCode> {
    let Some(first) = experiment.arms.first() else { bail!("the experiment has no arm") };
    let config = Config::from_toml(&spec.config_text(), first.settings.iter().map(String::as_str))?;
    let finished = finished_runs(folder, experiment);
    let n_seeds = experiment.arms.iter().filter(|arm| arm.name == first.name).count();
    let method = experiment.method.as_deref().unwrap_or(&first.name);
    power::print(&config, n_seeds, &by_arm(experiment, &finished), method)?;
    Ok(ExitCode::SUCCESS)
}

fn finished_runs<'a>(folder: &Path, experiment: &'a Experiment) -> Vec<StartedRun<'a>> {
    let runs = experiment.arms.iter().filter(|arm| arm.error.is_none());
    runs.filter_map(|arm| StartedRun::read(folder, arm)).filter(|run| run.has_ended).collect()
}

fn by_arm<'a>(experiment: &'a Experiment, finished: &'a [StartedRun]) -> Vec<ArmRuns<'a>> {
    let of_arm = |name| {
        let runs = finished.iter().filter(|run| run.arm.name == name).map(StartedRun::of_seed);
        ArmRuns { name, runs: runs.collect() }
    };
    experiment.arm_names().into_iter().map(of_arm).collect()
}

/// What the summary reads of a run.
struct StartedRun<'a> {
    arm: &'a Arm,
    metrics: Vec<Metrics>,
    config: Config,
    has_ended: bool,
}

impl<'a> StartedRun<'a> {
    /// None for a run that has no step or cannot be read.
    fn read(folder: &Path, arm: &'a Arm) -> Option<Self> {
        let folder = folder.join(&arm.run);
        let metrics: Vec<Metrics> = Run::read_metrics(&folder).ok()?;
        let last = metrics.last()?.step;
        let config = run_folder::plan(&folder).ok()?.config;
        let has_ended = has_ended(&read_events(&folder).unwrap_or_default(), last, config.steps);
        Some(StartedRun { arm, metrics, config, has_ended })
    }

    fn of_seed(&self) -> SeedRun<'_> {
        SeedRun { seed: self.arm.seed, metrics: &self.metrics, canaries: &self.config.canaries }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stapo_rl::run::FolderLock;

    /// A run of a process that was killed may hold its folder a moment longer.
    #[test]
    fn an_experiment_waits_for_the_last_moments_of_its_runs() {
        let folder = tempfile::tempdir().unwrap();
        let text = "name = \"m\"\nseeds = [7]\n[[arms]]\nname = \"a\"";
        let experiment = ExperimentSpec::from_toml(text).unwrap().expand().unwrap();
        let run = folder.path().join(&experiment.arms[0].run);
        std::fs::create_dir_all(&run).unwrap();
        let lock = FolderLock::take(&run).unwrap();
        let ends = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(150));
            drop(lock);
        });
        wait_for_runs(folder.path(), &experiment).unwrap();
        ends.join().unwrap();
    }

    #[test]
    fn runs_at_the_same_time_share_the_cores() {
        assert_eq!([0, 1, 2, 3, 9].map(|jobs| threads_of_run(8, jobs)), [8, 8, 4, 3, 1]);
    }

    #[test]
    fn all_arms_of_a_seed_run_before_the_next_seed() {
        let text = "name = \"m\"\nseeds = [7, 3]\n[[arms]]\nname = \"a\"\n[[arms]]\nname = \"b\"\n[[arms]]\nname = \"a-c\"";
        let experiment = ExperimentSpec::from_toml(text).unwrap().expand().unwrap();
        let runs = |only: &[&str]| {
            let only: Vec<String> = only.iter().map(ToString::to_string).collect();
            let places = chosen(&experiment, &[7, 3], &only).map_err(|error| error.to_string())?;
            Ok::<_, String>(
                places.into_iter().map(|place| experiment.arms[place].run.clone()).collect::<Vec<_>>(),
            )
        };
        let all = ["a/seed-7", "b/seed-7", "a-c/seed-7", "a/seed-3", "b/seed-3", "a-c/seed-3"];
        assert_eq!(runs(&[]).unwrap(), all);
        assert_eq!(runs(&["c", "b"]).unwrap(), ["b/seed-7", "a-c/seed-7", "b/seed-3", "a-c/seed-3"]);
        // A whole name is one arm; a part of names is all that have it.
        assert_eq!(runs(&["a"]).unwrap(), ["a/seed-7", "a/seed-3"]);
        assert_eq!(runs(&[""]).unwrap(), all);
        let said = runs(&["a", "d"]).unwrap_err();
        assert!(said.contains("--only d") && said.contains("a, b, a-c"), "{said}");
    }
}
