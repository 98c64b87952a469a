//! A plan as one JSON object.

use super::planned::{MemoryPhase, Planned};
use serde_json::{Map, Value, json};
use stapo_rl::plan::estimate::{Machine, Origin, RankedStep, Rate};

pub fn object(planned: &Planned) -> Value {
    let Planned { plan, shapes, machine, prediction, .. } = planned;
    let rollout = &plan.config.rollout;
    let parts: Map<String, Value> =
        planned.memory.parts().map(|part| (part.name.to_string(), json!(part.bytes))).collect();
    let used: Map<String, Value> = MemoryPhase::ALL
        .iter()
        .map(|phase| (phase.name().to_string(), json!(planned.used_bytes(*phase))))
        .collect();
    let phases: Map<String, Value> =
        prediction.phases.list().iter().map(|phase| (phase.name.to_string(), json!(phase.seconds))).collect();
    json!({
        "name": plan.config.name,
        "model": shapes.name,
        "parameters": shapes.model.n_parameters(),
        "steps": plan.config.steps,
        "optimizer_steps": plan.config.steps * plan.updates_per_step() as u64,
        "responses_per_step": rollout.problems_per_step * rollout.group_size,
        "response_tokens_at_most": planned.most_tokens(),
        "machine": of_machine(machine),
        "memory_bytes": parts,
        "memory_bytes_used_by": used,
        "memory_bytes_total": planned.total_bytes(),
        "memory_bytes_here": planned.memory_bytes,
        "disk_bytes_at_most": planned.disk.most_bytes,
        "disk_bytes_of_first_checkpoint": planned.disk.first_bytes,
        "disk_bytes_free_here": planned.disk_free,
        "fits": planned.fits(),
        "remedy": planned.remedy.as_ref().map(|remedy| json!({
            "set": remedy.changes.iter().map(|change| format!("{}={}", change.key, change.value)).collect::<Vec<_>>(),
            "memory_bytes_total": remedy.peak_bytes,
        })),
        "lengths": {
            "prompt_tokens_mean": prediction.lengths.prompt_mean,
            "response_tokens_mean": prediction.lengths.response_mean,
            "response_tokens_limit": prediction.lengths.response_limit,
        },
        "episodes": prediction.episodes.map(|episodes| json!({
            "turns_mean": episodes.turns,
            "given_tokens_mean": episodes.given(prediction.lengths),
            "answer_seconds_mean": episodes.answer_seconds,
            "answers_at_once": episodes.at_once,
        })),
        "time": {
            "is_measured": planned.measured.is_some(),
            "seconds": prediction.seconds(),
            "seconds_per_step": prediction.phases.total(),
            "phases": phases,
            "first_step_seconds": prediction.first_step,
            "sampled_tokens_per_second": prediction.sampled_per_second(),
            "trained_tokens_per_second": prediction.trained_per_second(),
            "sequences_at_once": prediction.most_running,
            "shared_prompt_tokens": prediction.n_saved_tokens,
        },
        "measured": planned.measured.map(|step| json!({
            "problems": step.n_problems,
            "response_tokens_limit": step.response_limit,
            "rollout_seconds": step.rollout_seconds,
            "update_seconds": step.update_seconds,
            "rollout_tokens_per_second": step.n_sampled / step.rollout_seconds,
            "update_tokens_per_second": step.n_trained / step.update_seconds,
            "prompt_tokens_mean": step.prompt_mean,
            "response_tokens_mean": step.response_mean,
            "truncated_share": step.truncated_share,
        })),
        "ranks": prediction.ranks.map(|ranks| of_ranks(planned, &ranks)),
        "assumed": planned.assumed,
        "notes": plan.notes(),
    })
}

fn of_ranks(planned: &Planned, ranks: &RankedStep) -> Value {
    let exchange = &ranks.exchange;
    let links = &ranks.world.links;
    json!({
        "ranks": ranks.world.n_ranks,
        "machines": ranks.world.n_nodes,
        "within_bytes": rate(&links.within),
        "between_bytes": rate(&links.between),
        "host_bytes": rate(&links.host),
        "rollout_seconds_mean": ranks.rollout_mean,
        "exchange_seconds": {
            "gradients": exchange.gradients,
            "fold": exchange.fold,
            "exposed": exchange.exposed,
            "weights": exchange.weights,
            "responses": exchange.responses,
        },
        "bytes_sent": exchange.bytes_sent,
        "exchange_share": exchange.seconds() / planned.prediction.phases.total(),
        "idle_share": ranks.idle_share,
        "one_gpu": planned.on_one.map(|one| json!({ "seconds_per_step": one.step_seconds, "fits": one.fits })),
        "efficiency": planned.efficiency(),
    })
}

fn rate(rate: &Rate) -> Value {
    json!({ "per_second": rate.per_second, "origin": rate.origin.word(), "source": rate.origin.source() })
}

pub(super) fn of_machine(machine: &Machine) -> Value {
    let attention = |rates: &[(f64, f64)], origin: Origin| {
        let points: Vec<Value> =
            rates.iter().map(|(length, rate)| json!({ "length": length, "per_second": rate })).collect();
        json!({ "by_length": points, "origin": origin.word(), "source": origin.source() })
    };
    json!({
        "name": machine.name,
        "description": machine.description,
        "products_operations": rate(&machine.products),
        "bandwidth_bytes": rate(&machine.bandwidth),
        "attention_forward_operations": attention(&machine.attention_forward, machine.attention_origin),
        "attention_backward_operations": attention(&machine.attention_backward, machine.attention_origin),
        "host_copy_bytes": rate(&machine.host_copy),
        "hash_bytes": rate(&machine.hash),
        "state_hash_bytes": rate(&machine.state_hash),
        "disk_bytes": rate(&machine.disk),
    })
}
