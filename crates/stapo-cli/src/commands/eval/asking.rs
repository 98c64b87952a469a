//! How an evaluation asks: as the command line says, and else as the run asked whose checkpoint is evaluated.

use super::Args;
use crate::shared::run_folder;
use anyhow::{Result, bail};
use stapo_rl::FoundModel;
use stapo_rl::plan::config::{EpisodeConfig, PromptStyle};
use stapo_rl::tasks::EnvironmentSpec;

/// Longest response of a model that is no run's: the paper's.
const MAX_TOKENS: usize = 20_480;

/// The settings of prompts and responses.
pub struct Asking {
    pub style: PromptStyle,
    pub template: Option<String>,
    pub system: Option<String>,
    pub max_tokens: usize,
    /// What answers the policy's turns, and the limits of its episodes.
    pub environment: Option<EnvironmentSpec>,
    pub episode: Option<EpisodeConfig>,
    /// The run that these settings come from where the command line does not give them.
    pub run: Option<String>,
}

impl Asking {
    pub fn choose(args: &Args, found: &FoundModel) -> Result<Self> {
        let mut asking = match found.run() {
            None => Self::of_no_run(),
            Some(folder) => {
                let plan = run_folder::plan(folder)?;
                Self {
                    system: plan.task.system().map(str::to_owned).filter(|_| plan.style.chat),
                    template: plan.config.evaluation.benchmark_template.clone(),
                    max_tokens: plan.config.rollout.max_response_tokens,
                    environment: plan.config.environment.clone().filter(|environment| !environment.judges()),
                    episode: plan.config.environment.is_some().then(|| plan.episode()),
                    style: plan.style,
                    run: Some(folder.display().to_string()),
                }
            }
        };
        if let Some(chat) = args.chat {
            asking.style.chat = chat;
        }
        if !asking.style.chat {
            asking.style.chat_arguments.clear();
            asking.system = None;
        }
        if let Some(arguments) = &args.chat_arguments {
            asking.style.chat_arguments.clone_from(arguments);
        }
        if !args.stop.is_empty() {
            asking.style.stop.clone_from(&args.stop);
        }
        asking.template = args.template.clone().or(asking.template);
        asking.system = args.system.clone().or(asking.system);
        asking.max_tokens = args.max_tokens.unwrap_or(asking.max_tokens);
        if let Some(text) = &args.tools {
            asking.environment = EnvironmentSpec::of_tools(text)?;
        }
        if let Some(max_turns) = args.max_turns {
            asking.episode = Some(EpisodeConfig { max_turns, ..asking.episode.unwrap_or_default() });
        }
        if asking.environment.is_none() {
            if args.max_turns.is_some() {
                bail!("--max-turns: has no effect without tools\nhint: add --tools, or leave it out");
            }
            asking.episode = None;
        }
        Ok(asking)
    }

    fn of_no_run() -> Self {
        let style = PromptStyle::default();
        let max_tokens = MAX_TOKENS;
        Self { style, template: None, system: None, max_tokens, environment: None, episode: None, run: None }
    }
}
