//! The memory of a pass, split once per half-layer into named views.

use super::layout::{ArenaLayout, HiddenSpan, ScoredRows, split};
use stapo_ops::{Buffer, Device, Float, OutOfMemory, View, ViewMut, lora};

/// Activations of a pass: rows in the device's compute precision, numbers per row exact.
#[derive(Debug)]
pub struct Arena<T: Float> {
    pub(super) compute: Buffer<T>,
    pub(super) exact: Buffer<T>,
}

/// The residual stream that comes into a half-layer, and its norm.
pub struct HalfEntry<'a, T: Float> {
    pub stream: ViewMut<'a, T>,
    pub normed: ViewMut<'a, T>,
    pub inv_rms: ViewMut<'a, T>,
}

/// What the norm on a half-layer's result keeps for backward; empty without such a norm.
pub struct ResultViews<'a, T: Float> {
    pub product: ViewMut<'a, T>,
    pub inv_rms: ViewMut<'a, T>,
}

/// [`ResultViews`] for backward.
pub struct ResultBackward<'a, T: Float> {
    pub product: View<'a, T>,
    pub inv_rms: View<'a, T>,
}

/// Memory for `x A^T` of a linear layer's adapters.
pub enum Hidden<'a, T: Float> {
    /// The pass leaves adapters out.
    Absent,
    /// `[T, pitch]`
    Apart(ViewMut<'a, T>),
    /// After each row of x.
    BehindInput,
}

impl<'a, T: Float> Hidden<'a, T> {
    /// `apart` is the memory of [`HiddenSpan::elements`].
    fn new(span: HiddenSpan, apart: ViewMut<'a, T>) -> Self {
        match span {
            HiddenSpan::Absent => Hidden::Absent,
            HiddenSpan::Apart(_) => Hidden::Apart(apart),
            HiddenSpan::BehindInput => Hidden::BehindInput,
        }
    }

    /// What a linear layer takes in: x, and this memory.
    pub fn with(self, x: ViewMut<'a, T>) -> Input<'a, T> {
        match self {
            Hidden::Absent => Input::Plain(x.into_view()),
            Hidden::Apart(hidden) => Input::Adapted(lora::Input::Apart { x: x.into_view(), hidden }),
            Hidden::BehindInput => Input::Adapted(lora::Input::Joined(x)),
        }
    }
}

/// What a linear layer takes in.
pub enum Input<'a, T: Float> {
    /// `[T, inputs]`, in a pass that leaves adapters out.
    Plain(View<'a, T>),
    Adapted(lora::Input<'a, T>),
}

/// Memory for the gradient of a linear layer's outputs.
pub struct OutputRows<'a, T: Float> {
    /// `[T, outputs]`, or with columns for the gradient of `x A^T` after its rows.
    pub rows: ViewMut<'a, T>,
    pub is_joined: bool,
}

/// [`Hidden`] of a half-layer's two linear layers.
pub struct HalfHidden<'a, T: Float> {
    /// Of the one that takes the norm in: queries, keys and values, or gate and up.
    pub first: Hidden<'a, T>,
    /// Of the one that writes to the residual stream: output, or down.
    pub second: Hidden<'a, T>,
}

/// What the backward of a linear layer's adapters reads, and memory for its gradient, `[T, pitch]` or more.
pub struct HiddenBackward<'a, T: Float> {
    /// `[T, pitch]`; `None` if it lies after x.
    pub hidden: Option<View<'a, T>>,
    pub d_hidden: ViewMut<'a, T>,
    pub factors: Factors,
}

/// The factors whose gradients the backward of an adapter makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Factors {
    Both,
    /// That of the first factor is made together with SwiGLU's.
    Second,
}

/// [`HiddenBackward`] of a half-layer's two linear layers.
pub struct HalfHiddenBackward<'a, T: Float> {
    pub first: Option<View<'a, T>>,
    pub second: Option<View<'a, T>>,
    pub d_hidden: ViewMut<'a, T>,
}

impl<T: Float> HalfHiddenBackward<'_, T> {
    pub fn first(&mut self) -> HiddenBackward<'_, T> {
        HiddenBackward { hidden: self.first, d_hidden: self.d_hidden.reborrow(), factors: Factors::Both }
    }

    pub fn second(&mut self) -> HiddenBackward<'_, T> {
        HiddenBackward { hidden: self.second, d_hidden: self.d_hidden.reborrow(), factors: Factors::Both }
    }
}

impl<'a, T: Float> HalfHiddenBackward<'a, T> {
    /// `None` for a pass that leaves adapters out.
    fn new(
        layout: &ArenaLayout,
        spans: [HiddenSpan; 2],
        [first, second, d_hidden]: [ViewMut<'a, T>; 3],
    ) -> Option<Self> {
        let apart = |span, view: ViewMut<'a, T>| match span {
            HiddenSpan::Apart(_) => Some(view.into_view()),
            HiddenSpan::Absent | HiddenSpan::BehindInput => None,
        };
        let [first, second] = [apart(spans[0], first), apart(spans[1], second)];
        layout.has_adapters.then_some(Self { first, second, d_hidden })
    }
}

/// What attention's forward reads and writes. Shapes: see `LayerSpans`.
pub struct AttentionViews<'a, T: Float> {
    pub entry: HalfEntry<'a, T>,
    pub raw_qkv: ViewMut<'a, T>,
    pub head_inv_rms: ViewMut<'a, T>,
    pub qkv: ViewMut<'a, T>,
    pub attended: ViewMut<'a, T>,
    pub lse: ViewMut<'a, T>,
    pub keys: ViewMut<'a, T>,
    pub result: ResultViews<'a, T>,
    pub addend: ViewMut<'a, T>,
    /// The feed-forward's entry.
    pub exit: HalfEntry<'a, T>,
    /// What the feed-forward of the layer before has activated; in the first layer, memory that nothing reads.
    pub activated: ViewMut<'a, T>,
    pub hidden: HalfHidden<'a, T>,
}

/// What the feed-forward's forward reads and writes. Shapes: see `LayerSpans`.
pub struct FfnViews<'a, T: Float> {
    pub entry: HalfEntry<'a, T>,
    pub gate_up: ViewMut<'a, T>,
    pub activated: ViewMut<'a, T>,
    pub result: ResultViews<'a, T>,
    pub addend: ViewMut<'a, T>,
    /// The next layer's entry; `None` after the last layer, whose result is needed for scored rows only.
    pub exit: Option<HalfEntry<'a, T>>,
    pub hidden: HalfHidden<'a, T>,
}

/// What a feed-forward reads and writes that begins with attention's last product. Shapes: see `LayerSpans`.
pub struct JoinedViews<'a, T: Float> {
    /// The residual stream in front of attention.
    pub stream: ViewMut<'a, T>,
    pub attended: ViewMut<'a, T>,
    pub addend: ViewMut<'a, T>,
    /// The feed-forward's entry.
    pub exit: HalfEntry<'a, T>,
    pub gate_up: ViewMut<'a, T>,
    pub activated: ViewMut<'a, T>,
}

/// What lies between the last layer and the head. Shapes: see `HeadSpans`.
pub struct HeadViews<'a, T: Float> {
    /// `[T, D]` each: the last layer's residual stream, and what its feed-forward adds.
    pub layer_stream: View<'a, T>,
    pub addend: View<'a, T>,
    pub stream: ViewMut<'a, T>,
    pub normed: ViewMut<'a, T>,
    pub inv_rms: ViewMut<'a, T>,
}

/// What attention's backward reads (activations) and writes (gradients).
pub struct AttentionBackward<'a, T: Float> {
    pub stream: View<'a, T>,
    pub normed: View<'a, T>,
    pub inv_rms: View<'a, T>,
    pub raw_qkv: View<'a, T>,
    pub head_inv_rms: View<'a, T>,
    pub qkv: View<'a, T>,
    pub attended: View<'a, T>,
    pub lse: View<'a, T>,
    pub result: ResultBackward<'a, T>,
    pub d_stream: ViewMut<'a, T>,
    pub d_normed: ViewMut<'a, T>,
    pub d_attended: ViewMut<'a, T>,
    pub d_qkv: ViewMut<'a, T>,
    pub d_raw_qkv: OutputRows<'a, T>,
    pub keys: ViewMut<'a, T>,
    pub d_keys: ViewMut<'a, T>,
    pub hidden: Option<HalfHiddenBackward<'a, T>>,
}

/// What the feed-forward's backward reads (activations) and writes (gradients).
pub struct FfnBackward<'a, T: Float> {
    pub stream: View<'a, T>,
    pub normed: View<'a, T>,
    pub inv_rms: View<'a, T>,
    pub gate_up: View<'a, T>,
    pub activated: View<'a, T>,
    pub result: ResultBackward<'a, T>,
    pub d_stream: ViewMut<'a, T>,
    pub d_normed: ViewMut<'a, T>,
    pub d_activated: ViewMut<'a, T>,
    pub d_gate_up: OutputRows<'a, T>,
    pub hidden: Option<HalfHiddenBackward<'a, T>>,
}

/// What the head's backward reads (activations) and writes (gradients).
pub struct HeadBackward<'a, T: Float> {
    pub stream: View<'a, T>,
    pub normed: View<'a, T>,
    pub inv_rms: View<'a, T>,
    /// `[R, D]` each
    pub d_stream: ViewMut<'a, T>,
    pub d_normed: ViewMut<'a, T>,
    /// `[T, D]`: of the residual stream after the last layer.
    pub d_layer_stream: ViewMut<'a, T>,
}

impl<T: Float> Arena<T> {
    pub(super) fn empty(device: &Device) -> Result<Self, OutOfMemory> {
        Ok(Self { compute: device.compute_zeros(0)?, exact: device.zeros(0)? })
    }

    pub fn attention(&mut self, layout: &ArenaLayout, index: usize) -> AttentionViews<'_, T> {
        let at = &layout.layers[index];
        let before = &layout.layers[index.saturating_sub(1)];
        let (entry, exit) = (at.attention, at.ffn);
        let [
            stream,
            normed,
            raw_qkv,
            qkv,
            attended,
            addend,
            exit_stream,
            exit_normed,
            activated,
            first,
            second,
            product,
            keys,
        ] = split(
            &mut self.compute,
            [
                entry.stream,
                entry.normed,
                at.raw_qkv,
                at.qkv,
                at.attended,
                layout.addend,
                exit.stream,
                exit.normed,
                before.activated,
                at.hidden.qkv.elements(),
                at.hidden.output.elements(),
                at.attention_result.product,
                at.keys,
            ],
        );
        let result = at.attention_result.inv_rms;
        let [inv_rms, head_inv_rms, lse, exit_inv_rms, result_inv_rms] =
            split(&mut self.exact, [entry.inv_rms, at.head_inv_rms, at.lse, exit.inv_rms, result]);
        AttentionViews {
            entry: HalfEntry { stream, normed, inv_rms },
            raw_qkv,
            head_inv_rms,
            qkv,
            attended,
            lse,
            keys,
            result: ResultViews { product, inv_rms: result_inv_rms },
            addend,
            exit: HalfEntry { stream: exit_stream, normed: exit_normed, inv_rms: exit_inv_rms },
            activated,
            hidden: HalfHidden {
                first: Hidden::new(at.hidden.qkv, first),
                second: Hidden::new(at.hidden.output, second),
            },
        }
    }

    pub fn joined(&mut self, layout: &ArenaLayout, index: usize) -> JoinedViews<'_, T> {
        let at = &layout.layers[index];
        let [stream, attended, addend, exit_stream, normed, gate_up, activated] = split(
            &mut self.compute,
            [
                at.attention.stream,
                at.attended,
                layout.addend,
                at.ffn.stream,
                at.ffn.normed,
                at.gate_up,
                at.activated,
            ],
        );
        let [inv_rms] = split(&mut self.exact, [at.ffn.inv_rms]);
        let exit = HalfEntry { stream: exit_stream, normed, inv_rms };
        JoinedViews { stream, attended, addend, exit, gate_up, activated }
    }

    /// The residual stream in front of the last layer's attention and what that attended, of all rows, and where scored rows go.
    pub fn last_attended(&mut self, scored: &ScoredRows) -> [(View<'_, T>, ViewMut<'_, T>); 2] {
        let last = &scored.layout.layers[scored.layout.layers.len() - 1];
        let spans = [scored.stream, last.attention.stream, scored.attended, last.attended];
        let [stream, few, attended, few_attended] = split(&mut self.compute, spans);
        [(stream.into_view(), few), (attended.into_view(), few_attended)]
    }

    pub fn ffn(&mut self, layout: &ArenaLayout, index: usize) -> FfnViews<'_, T> {
        let at = &layout.layers[index];
        let next = layout.layers.get(index + 1).map(|next| next.attention);
        let exit = next.unwrap_or_default();
        let [stream, normed, gate_up, activated, product, addend, parts @ ..] = split(
            &mut self.compute,
            [
                at.ffn.stream,
                at.ffn.normed,
                at.gate_up,
                at.activated,
                at.ffn_result.product,
                layout.addend,
                exit.stream,
                exit.normed,
                at.hidden.gate_up.elements(),
                at.hidden.down.elements(),
            ],
        );
        let [exit_stream, exit_normed, first, second] = parts;
        let [inv_rms, exit_inv_rms, result_inv_rms] =
            split(&mut self.exact, [at.ffn.inv_rms, exit.inv_rms, at.ffn_result.inv_rms]);
        let exit = HalfEntry { stream: exit_stream, normed: exit_normed, inv_rms: exit_inv_rms };
        FfnViews {
            entry: HalfEntry { stream, normed, inv_rms },
            gate_up,
            activated,
            result: ResultViews { product, inv_rms: result_inv_rms },
            addend,
            exit: next.map(|_| exit),
            hidden: HalfHidden {
                first: Hidden::new(at.hidden.gate_up, first),
                second: Hidden::new(at.hidden.down, second),
            },
        }
    }

    pub fn head(&mut self, layout: &ArenaLayout) -> HeadViews<'_, T> {
        let last = &layout.layers[layout.layers.len() - 1];
        let [layer_stream, addend, stream, normed] = split(
            &mut self.compute,
            [last.ffn.stream, layout.addend, layout.head.stream, layout.head.normed],
        );
        let [inv_rms] = split(&mut self.exact, [layout.head.inv_rms]);
        HeadViews {
            layer_stream: layer_stream.into_view(),
            addend: addend.into_view(),
            stream,
            normed,
            inv_rms,
        }
    }

    pub fn attention_backward(&mut self, layout: &ArenaLayout, index: usize) -> AttentionBackward<'_, T> {
        let at = &layout.layers[index];
        let d = &at.gradients;
        let spans = [
            at.attention.stream,
            at.attention.normed,
            at.raw_qkv,
            at.qkv,
            at.attended,
            layout.gradients.stream,
            layout.addend,
            d.attended,
            d.qkv,
            d.raw_qkv.rows,
            at.hidden.qkv.elements(),
            at.hidden.output.elements(),
            layout.gradients.hidden,
            at.attention_result.product,
            d.keys[0],
            d.keys[1],
        ];
        let [stream, normed, raw_qkv, qkv, attended, parts @ ..] = split(&mut self.compute, spans);
        let [d_stream, d_normed, d_attended, d_qkv, d_raw_qkv, parts @ ..] = parts;
        let [first, second, d_hidden, product, keys, d_keys] = parts;
        let [inv_rms, head_inv_rms, lse, result_inv_rms] = split(
            &mut self.exact,
            [at.attention.inv_rms, at.head_inv_rms, at.lse, at.attention_result.inv_rms],
        );
        AttentionBackward {
            stream: stream.into_view(),
            normed: normed.into_view(),
            inv_rms: inv_rms.into_view(),
            raw_qkv: raw_qkv.into_view(),
            head_inv_rms: head_inv_rms.into_view(),
            qkv: qkv.into_view(),
            attended: attended.into_view(),
            lse: lse.into_view(),
            result: ResultBackward { product: product.into_view(), inv_rms: result_inv_rms.into_view() },
            d_stream,
            d_normed,
            d_attended,
            d_qkv,
            d_raw_qkv: OutputRows { rows: d_raw_qkv, is_joined: d.raw_qkv.is_joined },
            keys,
            d_keys,
            hidden: HalfHiddenBackward::new(
                layout,
                [at.hidden.qkv, at.hidden.output],
                [first, second, d_hidden],
            ),
        }
    }

    pub fn ffn_backward(&mut self, layout: &ArenaLayout, index: usize) -> FfnBackward<'_, T> {
        let at = &layout.layers[index];
        let d = &at.gradients;
        let spans = [
            at.ffn.stream,
            at.ffn.normed,
            at.gate_up,
            at.activated,
            layout.gradients.stream,
            layout.addend,
            d.activated,
            d.gate_up.rows,
            at.hidden.gate_up.elements(),
            at.hidden.down.elements(),
            layout.gradients.hidden,
            at.ffn_result.product,
        ];
        let [stream, normed, gate_up, activated, parts @ ..] = split(&mut self.compute, spans);
        let [d_stream, d_normed, d_activated, d_gate_up, first, second, d_hidden, product] = parts;
        let [inv_rms, result_inv_rms] = split(&mut self.exact, [at.ffn.inv_rms, at.ffn_result.inv_rms]);
        FfnBackward {
            stream: stream.into_view(),
            normed: normed.into_view(),
            inv_rms: inv_rms.into_view(),
            gate_up: gate_up.into_view(),
            activated: activated.into_view(),
            result: ResultBackward { product: product.into_view(), inv_rms: result_inv_rms.into_view() },
            d_stream,
            d_normed,
            d_activated,
            d_gate_up: OutputRows { rows: d_gate_up, is_joined: d.gate_up.is_joined },
            hidden: HalfHiddenBackward::new(
                layout,
                [at.hidden.gate_up, at.hidden.down],
                [first, second, d_hidden],
            ),
        }
    }

    pub fn head_backward(&mut self, layout: &ArenaLayout) -> HeadBackward<'_, T> {
        let d = &layout.gradients;
        let [stream, normed, d_stream, d_normed, d_layer_stream] = split(
            &mut self.compute,
            [layout.head.stream, layout.head.normed, d.head_stream, d.head_normed, d.stream],
        );
        let [inv_rms] = split(&mut self.exact, [layout.head.inv_rms]);
        HeadBackward {
            stream: stream.into_view(),
            normed: normed.into_view(),
            inv_rms: inv_rms.into_view(),
            d_stream,
            d_normed,
            d_layer_stream,
        }
    }

    /// `[R, D]`: the normed rows that the head reads.
    pub fn hidden(&mut self, layout: &ArenaLayout) -> View<'_, T> {
        self.head(layout).normed.into_view()
    }
}
