//! Which layers have their keys and values in one block of the KV cache.

use super::{LayerSpec, ModelConfig};
use std::cmp::Reverse;

/// Sets of layers with one window each. A block of the KV cache holds the keys and values of one set, so that the blocks in front
/// of a window are free for any set while other sets keep theirs. All sets have as many caches, and so blocks of one size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerSets {
    /// The window of each set's layers; `None`: all keys.
    pub windows: Vec<Option<usize>>,
    /// A layer whose cache has the size of each cache.
    pub cache_layers: Vec<usize>,
    /// The set of each layer, and the cache in which its blocks lie.
    places: Vec<(usize, usize)>,
}

/// The most sets: every set has a table of blocks for each sequence.
const MAX_SETS: usize = 8;
/// Positions in front of a window that are kept: attention reads whole tiles of keys, on the CPU of 256, and the end of a turn may
/// take the last token back.
pub const KEPT_BEFORE_WINDOW: usize = 256 + 16;

impl LayerSets {
    pub fn new(config: &ModelConfig) -> Self {
        let layers = &config.layers;
        let window = |layer: &LayerSpec| layer.attention().rule.window;
        let mut kinds: Vec<(Option<usize>, Vec<usize>)> = Vec::new();
        for (index, layer) in layers.iter().enumerate() {
            match kinds.iter_mut().find(|(kind, _)| *kind == window(layer)) {
                Some((_, members)) => members.push(index),
                None => kinds.push((window(layer), vec![index])),
            }
        }
        let size = |layer: &LayerSpec| (layer.attention().heads.kv, layer.attention().heads.dim);
        let are_equal = layers.iter().all(|layer| size(layer) == size(&layers[0]));
        let n_sets = |n_caches: usize| kinds.iter().map(|(_, m)| m.len().div_ceil(n_caches)).sum::<usize>();
        let n_caches = (1..=layers.len())
            .filter(|n_caches| are_equal && kinds.len() > 1 && n_sets(*n_caches) <= MAX_SETS)
            .min_by_key(|n_caches| (n_sets(*n_caches) * n_caches, Reverse(*n_caches)));
        let Some(n_caches) = n_caches else {
            // One set for all layers; keys in front of the widest window are free where every layer has one.
            let widest = layers.iter().map(window).collect::<Option<Vec<_>>>();
            return Self {
                windows: vec![widest.and_then(|windows| windows.into_iter().max())],
                cache_layers: (0..layers.len()).collect(),
                places: (0..layers.len()).map(|index| (0, index)).collect(),
            };
        };
        let mut sets =
            Self { windows: Vec::new(), cache_layers: vec![0; n_caches], places: vec![(0, 0); layers.len()] };
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
    /// Numbers that the KV cache holds for a sequence of `n_tokens`, of which a step computes up to `n_rows`.
    pub fn sequence_kv_numbers(&self, n_tokens: usize, n_rows: usize) -> u64 {
        let sets = LayerSets::new(self);
        let of_block: usize =
            sets.cache_layers.iter().map(|index| self.layers[*index].kv_numbers_per_token()).sum();
        let held = |window: &Option<usize>| {
            window.map_or(n_tokens, |window| n_tokens.min(window + KEPT_BEFORE_WINDOW + n_rows))
        };
        sets.windows.iter().map(held).sum::<usize>() as u64 * of_block as u64
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
        assert_eq!(config.sequence_kv_numbers(1000, 5), 1000 * config.kv_numbers_per_token());
        let (olmo, config) = sets("olmo-3-7b");
        assert_eq!((olmo.windows.len(), olmo.cache_layers.len()), (4, 8));
        for (index, layer) in config.layers.iter().enumerate() {
            assert_eq!(olmo.windows[olmo.set_of_layer(index)], layer.attention().rule.window);
            let blocks_of = |index| (olmo.set_of_layer(index), olmo.cache_of_layer(index));
            assert!((0..index).all(|other| blocks_of(other) != blocks_of(index)));
        }
        // Three of four layers hold a window of 4096.
        let share =
            config.sequence_kv_numbers(32_768, 1) as f64 / (32_768 * config.kv_numbers_per_token()) as f64;
        assert!((0.34..0.36).contains(&share), "{share}");
        // 29 and 5 layers: a place of 35 is empty.
        let (gemma, _) = sets("gemma-3-4b");
        assert_eq!((gemma.windows.len(), gemma.cache_layers.len()), (7, 5));
    }
}
