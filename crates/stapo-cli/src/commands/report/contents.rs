//! The contents of a report in order. The page, the PNG files and the CSV files are written from the same contents.

use super::{categories, claims, curves, gradients, judge, pareto, quadrants, survival, tokens};
use crate::shared::chart::Figure;
use crate::shared::html::escape;
use crate::shared::page::{self, THEME_BUTTON};
use crate::shared::run_status::run_status;
use crate::shared::study::table::{Table, text};
use crate::shared::study::{RunData, Study, StudyKind};
use crate::shared::study::{benchmarks, differences, headline, summary};
use anyhow::Result;
use stapo_core::record::StopReason;
use stapo_rl::lab::experiment::Measure;
use stapo_rl::run::receipt;
use std::fmt::Write;

pub struct Contents {
    title: String,
    subtitle: String,
    sections: Vec<ReportSection>,
}

struct ReportSection {
    id: &'static str,
    title: &'static str,
    blocks: Vec<ContentBlock>,
}

/// Tables with more rows start folded if a figure shows the same numbers.
const MAX_OPEN_ROWS: usize = 12;

pub enum ContentBlock {
    /// Plain text.
    Note(String),
    /// The reason why something is absent.
    Missing(String),
    Figures(Vec<Figure>),
    Table(&'static str, Table),
    /// A table inside a closed `<details>` element.
    Folded(&'static str, Table),
    /// HTML in which all texts of the run are escaped.
    Markup(String),
}

impl Contents {
    pub fn gather(study: &Study) -> Result<Self> {
        let mut sections = vec![headline_section(study)?];
        let has_steps = study.runs().all(|(_, run)| !run.metrics.is_empty());
        let is_compared = study.kind != StudyKind::Run && has_steps;
        let pairs = if is_compared { survival::pairs(study) } else { Vec::new() };
        if study.kind == StudyKind::Experiment && has_steps {
            sections.push(claim_section(study, &pairs)?);
        }
        sections.extend([benchmark_section(study)?, curve_section(study)]);
        if is_compared {
            sections.push(survival_section(study, &pairs));
        }
        sections.extend([quadrant_section(study)?, token_section(study), origin_section(study)]);
        let kind = match study.kind {
            StudyKind::Run => "run",
            StudyKind::Runs => "comparison",
            StudyKind::Experiment => "experiment",
        };
        let n_runs = study.runs().count();
        let n_steps = study.runs().map(|(_, run)| run.metrics.len()).max().unwrap_or(0);
        let of_runs = if study.kind == StudyKind::Run {
            let config = &study.arms[0].runs[0].plan.config;
            format!("{n_steps} of {} steps, seed {}", config.steps, config.seed)
        } else {
            format!("{} arms, {n_runs} runs of up to {n_steps} steps", study.arms.len())
        };
        Ok(Contents {
            title: study.name.clone(),
            subtitle: format!("STAPO {kind} report · {of_runs}"),
            sections,
        })
    }

    pub fn figures(&self) -> impl Iterator<Item = &Figure> {
        let blocks = self.sections.iter().flat_map(|section| &section.blocks);
        blocks
            .filter_map(|block| if let ContentBlock::Figures(figures) = block { Some(figures) } else { None })
            .flatten()
    }

    /// The blocks of each section, by the section's id.
    #[cfg(test)]
    pub fn blocks(&self) -> impl Iterator<Item = (&'static str, &[ContentBlock])> {
        self.sections.iter().map(|section| (section.id, section.blocks.as_slice()))
    }

    pub fn tables(&self) -> impl Iterator<Item = &Table> {
        self.sections.iter().flat_map(|section| &section.blocks).filter_map(|block| match block {
            ContentBlock::Table(_, table) | ContentBlock::Folded(_, table) => Some(table),
            _ => None,
        })
    }

    pub fn to_html(&self) -> String {
        let mut body = format!(
            "<header><h1>{}</h1><p>{}</p>{THEME_BUTTON}</header><nav>",
            escape(&self.title),
            escape(&self.subtitle)
        );
        for section in &self.sections {
            let _ = write!(body, "<a href=\"#{}\">{}</a>", section.id, section.title);
        }
        body.push_str("</nav><main>");
        for section in &self.sections {
            let _ = write!(body, "<section><h2 id=\"{}\">{}</h2>", section.id, section.title);
            section.blocks.iter().for_each(|block| body.push_str(&block.to_html()));
            body.push_str("</section>\n");
        }
        body.push_str("</main>");
        page::page(&format!("{} – STAPO report", self.title), "", &body, "")
    }
}

impl ContentBlock {
    fn to_html(&self) -> String {
        match self {
            ContentBlock::Note(text) => format!("<p class=\"note\">{}</p>", escape(text)),
            ContentBlock::Missing(text) => format!("<p class=\"missing\">{}</p>", escape(text)),
            ContentBlock::Figures(figures) => {
                format!(
                    "<div class=\"figures\">{}</div>",
                    figures.iter().map(page::figure).collect::<String>()
                )
            }
            ContentBlock::Table("", table) => table.to_html(),
            ContentBlock::Table(title, table) => format!("<h3>{}</h3>{}", escape(title), table.to_html()),
            ContentBlock::Folded(title, table) => {
                format!("<details><summary>{}</summary>{}</details>", escape(title), table.to_html())
            }
            ContentBlock::Markup(markup) => markup.clone(),
        }
    }
}

/// Adds a figure, or the reason for its absence.
fn figure_or_reason(
    found: std::result::Result<Figure, String>,
    blocks: &mut Vec<ContentBlock>,
    figures: &mut Vec<Figure>,
) {
    match found {
        Ok(figure) => figures.push(figure),
        Err(reason) => blocks.push(ContentBlock::Missing(reason)),
    }
}

fn headline_section(study: &Study) -> Result<ReportSection> {
    let mut blocks = Vec::new();
    let nothing = || ContentBlock::Missing("No step has been finished yet.".into());
    match study.kind {
        StudyKind::Run if study.arms[0].runs[0].metrics.is_empty() => blocks.push(nothing()),
        StudyKind::Run => blocks.push(ContentBlock::Markup(summary::cards(&study.arms[0].runs[0]))),
        _ if study.runs().any(|(_, run)| run.metrics.is_empty()) => blocks.push(ContentBlock::Missing(
            "No comparison: one of these runs has not finished a step yet.".into(),
        )),
        _ => compared(study, &mut blocks)?,
    }
    for line in &study.failed {
        blocks.push(ContentBlock::Missing(format!("No result: {line}")));
    }
    blocks.extend(study.unfinished().map(ContentBlock::Missing));
    Ok(ReportSection { id: "headline", title: "Headline", blocks })
}

/// The arms compared: results, differences of their plans, paired tests, costs.
fn compared(study: &Study, blocks: &mut Vec<ContentBlock>) -> Result<()> {
    let summary = study.summary()?;
    blocks.push(ContentBlock::Table("", summary::arms_table(study, &summary)));
    if let Some(figure) = pareto::figure(study, &summary) {
        blocks.push(ContentBlock::Figures(vec![figure]));
    }
    blocks.push(ContentBlock::Note(format!(
        "Means over seeds; in brackets the 95 % interval of the mean (Student's t). {}: {}. A seed has collapsed in entropy when its mean entropy falls under the plan's share of the first step's, and in accuracy when its training accuracy over ten steps falls under half of its best.",
        capital(summary.measure.name()),
        match summary.measure {
            Measure::HeldOut => "the last evaluation of a run",
            Measure::Training => "mean of the last tenth of the steps, since not every run was evaluated",
        }
    )));
    match (differences::table(study), study.kind) {
        (Some(table), _) => blocks.push(ContentBlock::Table("What differs", table)),
        (None, StudyKind::Runs) => {
            blocks.push(ContentBlock::Missing(
                "What differs: the plans differ in nothing but the seed.".into(),
            ));
        }
        (None, _) => {}
    }
    match summary::paired_table(&summary) {
        Some(table) => {
            blocks.push(ContentBlock::Table("Paired by seed", table));
            blocks.push(ContentBlock::Note(
                "Difference is the method minus the arm of the row, seed by seed; few seeds can only show large differences: with n seeds no permutation p, and no p of Wilcoxon's signed ranks (exact up to 50), is below 2 / 2ⁿ.".into(),
            ));
        }
        None => blocks.push(ContentBlock::Missing(
            "Paired by seed: needs experiment.json to name a method, and two seeds that it shares with another arm.".into(),
        )),
    }
    if let Some(table) = summary::cost_table(&summary) {
        let reach = study.reach.as_deref().unwrap_or_default();
        blocks.push(ContentBlock::Table("Cost", table));
        blocks.push(ContentBlock::Note(format!(
            "Responses sampled, and seconds of rollouts and updates, until the mean curve over seeds has the accuracy at which {reach} ended; interpolated between evaluations, which are not counted."
        )));
    }
    Ok(())
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |first| first.to_uppercase().chain(chars).collect())
}

fn benchmark_section(study: &Study) -> Result<ReportSection> {
    let scores = benchmarks::scores(study)?;
    let mut blocks = Vec::new();
    if scores.is_empty() {
        blocks.push(ContentBlock::Missing("No evaluation records (eval/) in these runs.".into()));
    } else {
        blocks.push(ContentBlock::Figures(benchmarks::figures(study, &scores)));
        let table = benchmarks::table(study, &scores);
        blocks.push(if table.rows.len() > MAX_OPEN_ROWS {
            ContentBlock::Folded("All benchmark results", table)
        } else {
            ContentBlock::Table("", table)
        });
    }
    if let Some(standings) = benchmarks::standings(study, &scores) {
        blocks.push(ContentBlock::Table("Average over benchmarks, %", standings.table("standings")?));
    }
    let mut published = String::from(
        "<details><summary>The paper's averages of six benchmarks, and its headline recomputed</summary>",
    );
    for (decoding, standings) in headline::published() {
        let _ = write!(published, "<h3>{}</h3>{}", escape(decoding), standings.table("published")?.to_html());
    }
    published.push_str("<p class=\"note\">arXiv 2602.15620: relative gain over the best baseline at each size, averaged over the sizes.</p></details>");
    blocks.push(ContentBlock::Markup(published));
    Ok(ReportSection { id: "benchmarks", title: "Benchmarks", blocks })
}

fn curve_section(study: &Study) -> ReportSection {
    if study.runs().all(|(_, run)| run.metrics.is_empty()) {
        let blocks = vec![ContentBlock::Missing("No step has been finished yet.".into())];
        return ReportSection { id: "curves", title: "Training", blocks };
    }
    let (figures, missing) = curves::curves(study);
    let mut blocks = vec![ContentBlock::Figures(figures)];
    blocks.extend(missing.into_iter().map(ContentBlock::Missing));
    if let Some(table) = judge::table(study) {
        blocks.push(ContentBlock::Table("Judge and rule", table));
        blocks.push(ContentBlock::Note(
            "Asked: the responses that the judge was asked about. Agreement: of these, those on which judge and rule agree whether the response is right. An accuracy that rises without the rule's is a sign of a policy that exploits its judge.".into(),
        ));
    }
    ReportSection { id: "curves", title: "Training", blocks }
}

/// Steps until collapse, for studies of several arms.
fn survival_section(study: &Study, pairs: &[survival::Pair]) -> ReportSection {
    let (figures, missing) = survival::figures(study);
    let mut blocks = Vec::new();
    if !figures.is_empty() {
        blocks.push(ContentBlock::Figures(figures));
    }
    blocks.extend(missing.into_iter().map(ContentBlock::Missing));
    if !pairs.is_empty() {
        blocks.push(ContentBlock::Folded("The method against each other one", survival::pairs_table(pairs)));
    }
    blocks.push(ContentBlock::Folded("Collapses of each arm", survival::table(study)));
    ReportSection { id: "survival", title: "Steps until collapse", blocks }
}

/// What an experiment supports, claim by claim, and its free parameters.
fn claim_section(study: &Study, pairs: &[survival::Pair]) -> Result<ReportSection> {
    let blocks = vec![
        ContentBlock::Table("", claims::table(study, pairs)?),
        ContentBlock::Note(claims::note(study)),
        ContentBlock::Table("Free parameters", claims::parameters(study)),
    ];
    Ok(ReportSection { id: "claims", title: "What these runs support", blocks })
}

fn quadrant_section(study: &Study) -> Result<ReportSection> {
    let mut blocks = Vec::new();
    let mut figures = Vec::new();
    figure_or_reason(quadrants::scatter(study)?, &mut blocks, &mut figures);
    figure_or_reason(quadrants::gradient_norms(study), &mut blocks, &mut figures);
    match gradients::figures(study)? {
        Ok(drawn) => figures.extend(drawn),
        Err(reason) => blocks.push(ContentBlock::Missing(reason)),
    }
    figure_or_reason(quadrants::entropy_change(study), &mut blocks, &mut figures);
    if !figures.is_empty() {
        blocks.insert(0, ContentBlock::Figures(figures));
    }
    Ok(ReportSection { id: "quadrants", title: "Tokens: how hard they push", blocks })
}

fn token_section(study: &Study) -> ReportSection {
    let mut blocks = Vec::new();
    let (silenced, explored) = (tokens::silenced(study), tokens::explored(study));
    let n_silenced = silenced.len();
    let bars = [
        categories::bars("silenced-tokens", "Most silenced tokens", "silenced tokens", &silenced),
        categories::bars("explored-tokens", "Most explored tokens", "kept candidates", &explored),
    ];
    let bars: Vec<Figure> = bars.into_iter().flatten().collect();
    if !bars.is_empty() {
        blocks.push(ContentBlock::Figures(bars));
    }
    if let Some(table) = categories::table("silenced-categories", &silenced) {
        blocks.push(ContentBlock::Table("Silenced tokens by category", table));
    }
    match tokens::by_text("most-silenced", study, tokens::silenced) {
        Some(table) => {
            blocks.push(ContentBlock::Table("Most silenced", table));
            blocks.push(ContentBlock::Note(format!(
                "Of {n_silenced} silenced tokens, all steps and runs of this report."
            )));
        }
        None => blocks.push(ContentBlock::Missing("Most silenced: no token was silenced.".into())),
    }
    match tokens::by_text("most-explored", study, tokens::explored) {
        Some(table) => {
            blocks.push(ContentBlock::Table("Exploratory tokens, kept", table));
            blocks.push(ContentBlock::Note(format!(
                "Of {} rewarded tokens below τp that stayed in the update: under S2T those whose entropy is not below its threshold.",
                explored.len()
            )));
        }
        None => blocks.push(ContentBlock::Missing(
            "Exploratory tokens, kept: none recorded (no rewarded token below τp was kept, or the run is older than these records).".into(),
        )),
    }
    match tokens::spurious(study) {
        Some(table) => {
            let n = table.rows.len();
            blocks.push(ContentBlock::Table("Spurious tokens", table));
            blocks.push(ContentBlock::Note(format!(
                "The {n} least likely of {n_silenced}; ␣ is a space, ⏎ a line break."
            )));
        }
        None => blocks.push(ContentBlock::Missing("Spurious tokens: none was silenced.".into())),
    }
    ReportSection { id: "tokens", title: "Tokens: what was silenced", blocks }
}

fn origin_section(study: &Study) -> ReportSection {
    let mut blocks = Vec::new();
    let mut commands = String::new();
    for (_, run) in study.runs() {
        let folder = run.folder.display().to_string();
        let quoted = shell_quoted(&format!("{folder}/plan.toml"));
        let _ = writeln!(commands, "stapo train {quoted} --out {}", shell_quoted(&format!("{folder}-again")));
    }
    let (_, first) = study.shown();
    let check = shell_quoted(&first.folder.display().to_string());
    let _ = writeln!(
        commands,
        "stapo verify {check} --replay   # every file, and the last steps again, compared with the recorded hashes"
    );
    blocks.push(ContentBlock::Markup(format!(
        "<h3>To get the same bits again</h3><pre>{}</pre>",
        escape(&commands)
    )));
    if study.kind != StudyKind::Run {
        let mut table = Table::new(
            "runs",
            &["run", "arm", "#seed", "#steps", "settings", "state after the last step (SHA-256)", "receipt"],
        );
        for (arm, run) in study.runs() {
            table.push(vec![
                text(run.folder.strip_prefix(&study.folder).unwrap_or(&run.folder).display().to_string()),
                text(&arm.name),
                text(run.seed.to_string()),
                text(run.metrics.len().to_string()),
                text(run.settings.join(" ")),
                text(last_hash(run)),
                text(receipt::short_of(&run.folder)),
            ]);
        }
        blocks.push(ContentBlock::Table("Runs", table));
    }
    blocks.push(ContentBlock::Table("What went in", inputs(first)));
    let happened = events(study);
    let is_long = happened.rows.len() > MAX_OPEN_ROWS;
    let block = if is_long { ContentBlock::Folded } else { ContentBlock::Table };
    blocks.push(block("What happened", happened));
    let plan = escape(&first.plan_text);
    let whose = escape(&first.folder.display().to_string());
    blocks.push(ContentBlock::Markup(format!(
        "<details><summary>Plan of {whose}, resolved</summary><pre>{plan}</pre></details>"
    )));
    ReportSection { id: "origin", title: "Plan, hashes, reproduction", blocks }
}

fn last_hash(run: &RunData) -> String {
    let last = run.manifest.as_ref().and_then(|manifest| manifest.steps.last());
    last.map_or("–".to_string(), |hash| hash.sha256.clone())
}

fn inputs(run: &RunData) -> Table {
    let mut table = Table::new("inputs", &["what", "SHA-256", "#bytes"]);
    for input in run.manifest.iter().flat_map(|manifest| &manifest.inputs) {
        table.push(vec![text(&input.name), text(&input.sha256), text(input.n_bytes.to_string())]);
    }
    table.push(vec![
        text("receipt of the run, first digits"),
        text(receipt::short_of(&run.folder)),
        text(""),
    ]);
    let step = run.metrics.last().map_or(0, |m| m.step);
    table.push(vec![text(format!("state after step {step}")), text(last_hash(run)), text("")]);
    if let Some(build) = &run.build {
        let machine = format!("stapo {}, {}, {} threads", build.version, build.target, build.n_threads);
        table.push(vec![text("program"), text(machine), text("")]);
    }
    table
}

/// Starts, changes, warnings and stops of all runs, and the state of each run.
fn events(study: &Study) -> Table {
    let mut table = Table::new("events", &["event", "what", "#step", "run", "time, UTC"]);
    for (_, run) in study.runs() {
        let name = run.folder.strip_prefix(&study.folder).unwrap_or(&run.folder).display().to_string();
        for event in &run.events {
            let kind = serde_json::to_value(event.event).ok();
            let kind =
                kind.as_ref().and_then(serde_json::Value::as_str).unwrap_or_default().replace('_', " ");
            let what = match (&event.writer, event.reason) {
                (Some(writer), _) => format!("{}, stapo {}, {}", writer.host, writer.program, writer.device),
                (None, Some(StopReason::Done)) => "all steps done".to_string(),
                (None, Some(StopReason::TargetReached)) => "target accuracy reached".to_string(),
                _ => event.text.clone(),
            };
            let step = event.step.to_string();
            table.push(vec![text(kind), text(what), text(step), text(&name), text(&event.time)]);
        }
        let step = run.metrics.last().map_or(0, |m| m.step);
        let status = run_status(&run.folder, step, run.plan.config.steps);
        table.push(vec![text("status"), text(status), text(step.to_string()), text(&name), text("")]);
    }
    table
}

/// Quotes a text for a shell.
fn shell_quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_string()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_folder_is_one_word_of_a_command() {
        assert_eq!(shell_quoted("runs/a-1.b_c"), "runs/a-1.b_c");
        assert_eq!(shell_quoted("my run"), "'my run'");
        assert_eq!(shell_quoted("a;rm -rf $HOME"), "'a;rm -rf $HOME'");
        assert_eq!((shell_quoted("it's"), shell_quoted("")), ("'it'\\''s'".to_string(), "''".to_string()));
        assert_eq!((capital("held-out"), capital("")), ("Held-out".to_string(), String::new()));
    }

    #[test]
    fn a_run_is_named_by_the_state_after_its_last_step() {
        let mut run = crate::shared::study::tests::run("s/a", &[], Vec::new());
        assert_eq!(last_hash(&run), "–");
        let hash = |step: u64, sha256: &str| json!({"step": step, "sha256": sha256});
        let steps = [hash(1, "aa"), hash(2, "bb")];
        run.manifest =
            Some(serde_json::from_value(json!({"schema": 1, "inputs": [], "steps": steps})).unwrap());
        assert_eq!(last_hash(&run), "bb");
    }

    #[test]
    fn a_comparison_of_costs_names_the_arm_that_they_reach() {
        let study = summary::tests::costly();
        let mut blocks = Vec::new();
        compared(&study, &mut blocks).unwrap();
        let page: String = blocks.iter().map(ContentBlock::to_html).collect();
        assert!(page.contains("<h3>Cost</h3>") && page.contains("at which a ended"), "{page}");
        assert!(page.contains("Held-out accuracy: the last evaluation of a run."), "{page}");
    }
}
