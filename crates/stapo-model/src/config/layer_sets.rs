//! Which layers have their keys and values in one block of the KV cache.

use super::ModelConfig;
use std::cmp::Reverse;

/// Sets of layers with one window each. A block of the KV cache holds the keys and values of one set, so that the blocks in front
/// of a window are free for any set while other sets keep theirs. All sets have the same number of caches, and so blocks of one size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerSets {
    /// The window of each set's layers; `None`: all keys.
    pub windows: Vec<Option<usize>>,
    /// A layer whose cache has the size of each cache.
    pub cache_layers: Vec<usize>,
    /// The set of each layer, and the cache in which its blocks lie; without meaning for a layer without attention.
    places: Vec<(usize, usize)>,
}

/// The most sets: every set has a table of blocks for each sequence.
const MAX_SETS: usize = 8;
/// Positions in front of a window that are read: attention reads whole tiles of keys, on the CPU of 256.
pub const READ_BEFORE_WINDOW: usize = 256;
/// Positions by which a sequence may be cut back: the end of a turn may take the last token back, and a model that drafts takes back
/// its last drafts.
pub const REWOUND_POSITIONS: usize = 16;
/// Positions in front of a window that are kept.
pub const KEPT_BEFORE_WINDOW: usize = READ_BEFORE_WINDOW + REWOUND_POSITIONS;

impl LayerSets {
    pub fn new(config: &ModelConfig) -> Self {
        let layers = || config.layers.iter().enumerate();
        let attentions = || layers().filter_map(|(index, layer)| Some((index, layer.attention()?)));
        let mut kinds: Vec<(Option<usize>, Vec<usize>)> = Vec::new();
        for (index, attention) in attentions() {
            match kinds.iter_mut().find(|(window, _)| *window == attention.rule.window) {
                Some((_, members)) => members.push(index),
                None => kinds.push((attention.rule.window, vec![index])),
            }
        }
        let sizes = || config.attentions().map(|attention| (attention.heads.kv, attention.heads.dim));
        let are_equal = sizes().all(|size| Some(size) == sizes().next());
        let n_sets = |n_caches: usize| kinds.iter().map(|(_, m)| m.len().div_ceil(n_caches)).sum::<usize>();
        let n_caches = (1..=attentions().count())
            .filter(|n_caches| are_equal && kinds.len() > 1 && n_sets(*n_caches) <= MAX_SETS)
            .min_by_key(|n_caches| (n_sets(*n_caches) * n_caches, Reverse(*n_caches)));
        let mut sets =
            Self { windows: Vec::new(), cache_layers: Vec::new(), places: vec![(0, 0); config.layers.len()] };
        let Some(n_caches) = n_caches else {
            // One set for all layers; keys in front of the widest window are free where every layer has one.
            let widest = kinds.iter().map(|(window, _)| *window).collect::<Option<Vec<_>>>();
            sets.windows.push(widest.and_then(|windows| windows.into_iter().max()));
            sets.cache_layers.extend(attentions().map(|(index, _)| index));
            for (cache, index) in sets.cache_layers.iter().enumerate() {
                sets.places[*index] = (0, cache);
            }
            return sets;
        };
        sets.cache_layers = attentions().map(|(index, _)| index).take(n_caches).collect();
        for (window, members) in kinds {
            for members in members.chunks(n_caches) {
                for (cache, index) in members.iter().enumerate() {
                    sets.places[*index] = (sets.windows.len(), cache);
                }
                sets.windows.push(window);
            }
        }
        sets
    }

    pub fn set_of_layer(&self, index: usize) -> usize {
        self.places[index].0
    }

    pub fn cache_of_layer(&self, index: usize) -> usize {
        self.places[index].1
    }
}

impl ModelConfig {
    /// Bytes within which an engine can run a sequence of `n_tokens`, of which a step computes up to `n_rows`, where an activation has
    /// `compute_bytes`. Where layers keep states, these take half of the memory at most, and so do keys and values.
    pub fn sequence_bytes(&self, n_tokens: usize, n_rows: usize, compute_bytes: usize) -> u64 {
        let sets = LayerSets::new(self);
        let of_block: usize =
            sets.cache_layers.iter().map(|index| self.layers[*index].kv_numbers_per_token()).sum();
        let held = |window: &Option<usize>| {
            window.map_or(n_tokens, |window| n_tokens.min(window + KEPT_BEFORE_WINDOW + n_rows))
        };
        let keys_and_values =
            sets.windows.iter().map(held).sum::<usize>() as u64 * (of_block * compute_bytes) as u64;
        match self.state_bytes(compute_bytes) {
            0 => keys_and_values,
            states => 2 * keys_and_values.max(states),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sets(name: &str) -> (LayerSets, ModelConfig) {
        let config = ModelConfig::known(name).expect("a known model");
        (LayerSets::new(&config), config)
    }

    #[test]
    fn layers_of_one_window_share_blocks_and_sets_have_one_size() {
        let (plain, config) = sets("qwen3-0.6b");
        assert_eq!((plain.windows.as_slice(), plain.cache_layers.len()), (&[None][..], 28));
        assert_eq!(config.sequence_bytes(1000, 5, 2), 2000 * config.kv_numbers_per_token());
        let (olmo, config) = sets("olmo-3-7b");
        assert_eq!((olmo.windows.len(), olmo.cache_layers.len()), (4, 8));
        for (index, layer) in config.layers.iter().enumerate() {
            assert_eq!(
                olmo.windows[olmo.set_of_layer(index)],
                layer.attention().and_then(|attention| attention.rule.window)
            );
            let blocks_of = |index| (olmo.set_of_layer(index), olmo.cache_of_layer(index));
            assert!((0..index).all(|other| blocks_of(other) != blocks_of(index)));
        }
        // Three of four layers hold a window of 4096.
        let share = |config: &ModelConfig, n: u64| {
            config.sequence_bytes(n as usize, 1, 1) as f64 / (n * config.kv_numbers_per_token()) as f64
        };
        assert!((0.34..0.36).contains(&share(&config, 32_768)), "{}", share(&config, 32_768));
        assert!((0.43..0.46).contains(&share(&config, 16_384)), "{}", share(&config, 16_384));
        // 29 and 5 layers: a place of 35 is empty.
        let (gemma, config) = sets("gemma-3-4b");
        assert!((0.19..0.22).contains(&share(&config, 16_384)), "{}", share(&config, 16_384));
        assert_eq!((gemma.windows.len(), gemma.cache_layers.len()), (7, 5));
    }

    #[test]
    fn layers_without_attention_have_no_cache() {
        let (sets, config) = sets("qwen3.5-9b");
        let attends = |index: &usize| config.layers[*index].attention().is_some();
        let attending: Vec<usize> = (0..config.layers.len()).filter(attends).collect();
        assert!(!attending.is_empty() && attending.len() < config.layers.len());
        assert_eq!((&sets.windows[..], &sets.cache_layers), (&[None][..], &attending));
        for (cache, index) in attending.iter().enumerate() {
            assert_eq!((sets.set_of_layer(*index), sets.cache_of_layer(*index)), (0, cache));
        }
        let keys_and_values = 1_000_000 * config.kv_numbers_per_token();
        assert!(config.state_bytes(4) < keys_and_values);
        assert_eq!(config.sequence_bytes(1_000_000, 1, 4), 2 * 4 * keys_and_values);
        // On a GPU in bf16 a state is f32. Kept with it are a chunk of keys and values, a block of 16 rows more, decays and the
        // system of a block.
        let state = 32 * (128 * 128 * 4 + (2 * 64 + 16) * 128 * 2 + (64 + 16 * 16) * 4) + 4 * 8192 * 2;
        assert_eq!(config.layers[0].state_bytes(2), state);
    }
}
