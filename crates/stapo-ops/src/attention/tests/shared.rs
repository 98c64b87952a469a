//! Keys that lie apart from the queries: responses that share the keys of a prompt.

use super::super::key_copies::{self, Copies};
use super::super::sequences::Sequences;
use super::*;

/// A prompt and the responses that continue it.
#[derive(Clone, Copy)]
pub(crate) struct Group {
    pub prompt: usize,
    pub responses: &'static [usize],
}

/// Groups packed as trees: the rows of a prompt once, then those of each response. The first response's sequence has the
/// queries of the prompt too.
pub(crate) struct Tree {
    pub n_tokens: usize,
    /// Queries, and keys, of each sequence.
    lens: Vec<(usize, usize)>,
    /// The row of the tree that each row of keys is a copy of: the rows of whole sequences, one after another.
    rows: Vec<u32>,
}

impl Tree {
    /// Sequences of so many queries and keys; the keys in front of the queries are copies of any rows.
    pub fn chunks(lens: &[(usize, usize)]) -> Self {
        let n_tokens = lens.iter().map(|(queries, _)| *queries).sum();
        let mut tree = Self { n_tokens, lens: lens.to_vec(), rows: Vec::new() };
        let mut start = 0;
        for &(queries, keys) in lens {
            let before = (queries..keys).map(|at| at * 7 % n_tokens);
            tree.rows.extend(before.chain(start..start + queries).map(|row| row as u32));
            start += queries;
        }
        tree
    }

    pub fn new(groups: &[Group]) -> Self {
        let mut tree = Self { n_tokens: 0, lens: Vec::new(), rows: Vec::new() };
        for group in groups {
            let prompt = tree.n_tokens..tree.n_tokens + group.prompt;
            tree.n_tokens = prompt.end;
            for (idx, &len) in group.responses.iter().enumerate() {
                let n_queries = if idx == 0 { group.prompt + len } else { len };
                tree.lens.push((n_queries, group.prompt + len));
                let rows = prompt.clone().chain(tree.n_tokens..tree.n_tokens + len);
                tree.rows.extend(rows.map(|row| row as u32));
                tree.n_tokens += len;
            }
        }
        tree
    }

    fn dims(&self, heads: Heads, rule: ScoreRule) -> Dims {
        Dims { tokens: self.n_tokens, sequences: self.lens.len(), heads, rule }
    }

    fn key_lens(&self) -> Vec<usize> {
        self.lens.iter().map(|(_, keys)| *keys).collect()
    }

    /// Rows of keys that are queries of their sequence.
    fn are_queries(&self) -> Vec<bool> {
        let of_sequence = |&(queries, keys): &(usize, usize)| (0..keys).map(move |at| at >= keys - queries);
        self.lens.iter().flat_map(of_sequence).collect()
    }

    /// The rows of whole sequences, of rows of the tree; `None` in the place of rows that are no query of their sequence.
    pub fn queries<'a>(&self, whole: &'a [f32]) -> Vec<Option<&'a [f32]>> {
        let width = whole.len() / self.rows.len();
        whole.chunks(width).zip(self.are_queries()).map(|(row, is_query)| is_query.then_some(row)).collect()
    }

    /// The rows of whole sequences, of rows of the tree.
    fn expand<T: Float>(&self, x: &[T]) -> Vec<T> {
        let width = x.len() / self.n_tokens;
        self.rows.iter().flat_map(|&row| &x[row as usize * width..][..width]).copied().collect()
    }
}

/// A buffer in compute precision that holds `x`.
fn compute<T: Float>(device: &Device, x: &[T]) -> Buffer<T> {
    let mut buffer = device.compute_zeros(x.len()).unwrap();
    buffer.view_mut().write(x);
    buffer
}

/// A buffer that an op is to fill.
fn empty<T: Float>(device: &Device, n: usize) -> Buffer<T> {
    compute(device, &vec![T::from_f64(f64::NAN); n])
}

/// out, lse and d_qkv of the rows of a tree.
pub(crate) fn tree_case<T: Float>(
    device: &Device,
    (heads, rule): (Heads, ScoreRule),
    tree: &Tree,
    qkv: &[T],
    d_out: &[T],
) -> Tensors<T> {
    let dims = tree.dims(heads, rule);
    let mut copies: Vec<Vec<u32>> = vec![Vec::new(); tree.n_tokens];
    (0..).zip(&tree.rows).for_each(|(copy, &row)| copies[row as usize].push(copy));
    let starts = offsets(&copies.iter().map(Vec::len).collect::<Vec<_>>());
    let queries: Vec<usize> = tree.lens.iter().map(|(queries, _)| *queries).collect();
    let lists = [tree.rows.clone(), starts, copies.concat(), offsets(&queries), offsets(&tree.key_lens())];
    let [rows, starts, list, queries, key_offsets] = lists.map(|x| upload(device, &x));
    let copies = Copies { rows: rows.view(), starts: starts.view(), list: list.view() };
    let n_keys = tree.rows.len() * 2 * heads.kv * heads.dim;
    let (mut keys, mut d_keys) = (empty(device, n_keys), empty(device, n_keys));
    let (qkv, d_out) = (compute(device, qkv), compute(device, d_out));
    key_copies::forward(device, heads, copies, qkv.view(), keys.view_mut());
    let apart = Keys { rows: keys.view(), offsets: key_offsets.view() };
    let sequences = Sequences { offsets: queries.view(), keys: Some(apart) };
    let mut out = empty(device, dims.tokens * heads.out_width());
    let mut lse = device.zeros(dims.tokens * heads.query).unwrap();
    forward(device, dims, qkv.view(), sequences, out.view_mut(), lse.view_mut());
    let mut d_qkv = empty(device, qkv.len());
    let saved = Saved { qkv: qkv.view(), out: out.view(), lse: lse.view() };
    let to = Gradients { qkv: d_qkv.view_mut(), keys: Some(d_keys.view_mut()) };
    backward(device, dims, saved, sequences, d_out.view(), to);
    key_copies::backward(device, heads, copies, d_keys.view(), d_qkv.view_mut());
    [out, lse, d_qkv].iter().map(|buffer| buffer.view().to_vec()).collect()
}

pub(crate) const GROUPS: [Group; 4] = [
    Group { prompt: 5, responses: &[3, 1, 7] },
    Group { prompt: 70, responses: &[60, 0, 2] },
    Group { prompt: 1, responses: &[9] },
    Group { prompt: 130, responses: &[1, 131, 64, 5] },
];

pub(crate) fn rules(heads: Heads) -> [ScoreRule; 3] {
    let plain = ScoreRule::plain(heads.dim);
    [plain, ScoreRule { window: Some(20), ..plain }, ScoreRule { softcap: Some(2.0), ..plain }]
}

/// Of whole sequences, with the gradients of rows that are no query of their sequence taken as 0: out, lse and d_qkv.
pub(crate) fn whole_case(
    device: &Device,
    (heads, rule): (Heads, ScoreRule),
    tree: &Tree,
    qkv: &[f32],
    d_out: &[f32],
) -> Tensors<f32> {
    let lens = tree.key_lens();
    let dims = Dims { tokens: tree.rows.len(), sequences: lens.len(), heads, rule };
    let (qkv, offsets) = (compute(device, &tree.expand(qkv)), upload(device, &offsets(&lens)));
    let mut d_rows = tree.expand(d_out);
    for (row, is_query) in d_rows.chunks_mut(heads.out_width()).zip(tree.are_queries()) {
        if !is_query {
            row.fill(0.0);
        }
    }
    let d_out = compute(device, &d_rows);
    let mut out = empty(device, dims.tokens * heads.out_width());
    let mut lse = device.zeros(dims.tokens * heads.query).unwrap();
    forward(device, dims, qkv.view(), offsets.view(), out.view_mut(), lse.view_mut());
    let mut d_qkv = empty(device, qkv.len());
    let saved = Saved { qkv: qkv.view(), out: out.view(), lse: lse.view() };
    backward(device, dims, saved, offsets.view(), d_out.view(), d_qkv.view_mut());
    [out, lse, d_qkv].iter().map(|buffer| buffer.view().to_vec()).collect()
}

/// Asserts that a tree has the bits of whole sequences in out and lse, and that its gradients are `within` the sums of theirs.
pub(crate) fn assert_shares(device: &Device, (heads, rule): (Heads, ScoreRule), tree: &Tree, within: f64) {
    let qkv = values::<f32>(1, tree.n_tokens * heads.qkv_width());
    let d_out = values::<f32>(2, tree.n_tokens * heads.out_width());
    let shared = tree_case(device, (heads, rule), tree, &qkv, &d_out);
    let whole = whole_case(device, (heads, rule), tree, &qkv, &d_out);
    for (shared, whole) in shared[..2].iter().zip(&whole) {
        let expanded = tree.expand(shared);
        for (row, (got, expected)) in tree.queries(&expanded).iter().zip(tree.queries(whole)).enumerate() {
            assert_eq!(got.map(bits), expected.map(bits), "{heads:?} {rule:?}: row {row}");
        }
    }
    let mut sums = vec![0.0f64; shared[2].len()];
    for (row, from) in tree.rows.iter().zip(whole[2].chunks(heads.qkv_width())) {
        let to = &mut sums[*row as usize * heads.qkv_width()..][..heads.qkv_width()];
        to.iter_mut().zip(from).for_each(|(sum, x)| *sum += f64::from(*x));
    }
    let square = |x: f64| x * x;
    let off: f64 = shared[2].iter().zip(&sums).map(|(a, b)| square(f64::from(*a) - b)).sum();
    let distance = (off / sums.iter().copied().map(square).sum::<f64>()).sqrt();
    assert!(distance <= within, "{heads:?} {rule:?}: gradients are off by {distance:.2e}");
}

#[test]
fn shared_keys_give_the_bits_of_whole_sequences_and_the_sums_of_their_gradients() {
    let device = &device();
    let chunks = Tree::chunks(&[(37, 100), (3, 3), (0, 5), (1, 130), (65, 300)]);
    for heads in HEADS {
        for rule in rules(heads) {
            assert_shares(device, (heads, rule), &Tree::new(&GROUPS), 1e-6);
            assert_shares(device, (heads, rule), &chunks, 1e-6);
        }
    }
}

#[test]
fn gradients_of_shared_keys_are_finite_differences() {
    let device = device();
    let tree = Tree::new(&[GROUPS[0], Group { prompt: 3, responses: &[2, 4] }]);
    for heads in [HEADS[0], Heads { query: 4, kv: 2, dim: 3 }] {
        let rule = (heads, ScoreRule::plain(heads.dim));
        let qkv: Vec<f64> = values(1, tree.n_tokens * heads.qkv_width());
        let d_out = &cotangents(&[vec![0.0; tree.n_tokens * heads.out_width()]])[0];
        let gradients = vec![tree_case(&device, rule, &tree, &qkv, d_out).remove(2)];
        let loss = |x: &Tensors<f64>| project(&tree_case(&device, rule, &tree, &x[0], d_out)[..1]);
        assert_gradients(&vec![qkv], &gradients, loss);
    }
}

#[test]
fn shared_keys_agree_on_all_devices() {
    let (tree, heads) = (Tree::new(&GROUPS), HEADS[1]);
    let qkv = values::<f32>(1, tree.n_tokens * heads.qkv_width());
    let d_out = values::<f32>(2, tree.n_tokens * heads.out_width());
    let rule = (heads, ScoreRule::plain(heads.dim));
    assert_same_on_all_devices(|device| tree_case(device, rule, &tree, &qkv, &d_out));
}

#[test]
#[should_panic(expected = "has more queries than keys")]
fn more_queries_than_keys_are_refused() {
    let (device, heads) = (device(), Heads { query: 1, kv: 1, dim: 2 });
    let [queries, key_offsets] = [[0, 2], [0, 1]].map(|x| upload(&device, &x));
    let (qkv, keys) = (upload(&device, &[0f32; 12]), upload(&device, &[0f32; 4]));
    let (mut out, mut lse) = (device.zeros(4).unwrap(), device.zeros(2).unwrap());
    let apart = Keys { rows: keys.view(), offsets: key_offsets.view() };
    let sequences = Sequences { offsets: queries.view(), keys: Some(apart) };
    forward(&device, dims(heads, &[2]), qkv.view(), sequences, out.view_mut(), lse.view_mut());
}
