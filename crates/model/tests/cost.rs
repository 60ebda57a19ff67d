//! The cost of a small plan, against sums made by hand.

use bodkin_gguf::Format;
use bodkin_model::{
    Attention, Cost, EmbedBy, Entries, Gating, KvSlot, NormKind, Op, Plan, Routing, SlotId, Value,
    Weight, WeightId,
};

fn weight(name: &str, format: Format, rows: usize, cols: usize) -> Weight {
    let bytes = (rows * format.row_bytes(cols).expect("a dense format of whole blocks")) as u64;
    Weight { name: name.to_owned(), format, cols, rows, bytes, layer: None }
}

fn attention(value_dim: usize, window: Option<usize>) -> (Attention, KvSlot) {
    let (heads, kv_heads, key_dim) = (4, 2, 4);
    let (scale, softcap) = (0.5, None);
    let (chunked, causal, sinks, entries) = (false, true, None, Entries::Tokens);
    (
        Attention {
            heads,
            kv_heads,
            key_dim,
            value_dim,
            scale,
            temperature: None,
            softcap,
            window,
            chunked,
            causal,
            sinks,
            entries,
        },
        KvSlot { kv_heads, key_dim, value_dim, window, ratio: 1 },
    )
}

/// A table of ten tokens, two layers of attention, and a head that is `head`.
fn plan(head: WeightId) -> Plan {
    let (open, open_slot) = attention(8, None);
    let (local, local_slot) = attention(8, Some(5));
    let none = None;
    let norm = |input, weight| Op::Norm {
        input,
        kind: NormKind::Rms,
        weight,
        bias: none,
        eps: 1e-5,
        groups: 1,
    };
    let (q, kv) = (Value(2), Some([Value(3), Value(4)]));
    let linear = |input, weight, bias| Op::Linear { input: Value(input), weight, bias };
    let ops = vec![
        Op::Embed { table: WeightId(0), by: EmbedBy::Token },
        norm(Value(0), Some(WeightId(1))),
        linear(1, WeightId(2), Some(WeightId(3))),
        linear(1, WeightId(4), none),
        linear(1, WeightId(4), none),
        Op::Attention { q, kv, attention: open, slot: SlotId(0) },
        Op::Attention { q, kv, attention: local, slot: SlotId(1) },
        Op::Add { a: Value(5), b: Value(6) },
        Op::Logits { input: Value(7), weight: head, bias: none },
    ];
    Plan {
        architecture: "none".to_owned(),
        context_length: 64,
        vocabulary: 10,
        weights: vec![
            weight("table", Format::F16, 10, 32),
            weight("norm", Format::F32, 1, 32),
            weight("q", Format::Q8_0, 16, 32),
            weight("q.bias", Format::F32, 1, 16),
            weight("kv", Format::Q4_0, 16, 32),
            weight("head", Format::F16, 10, 32),
        ],
        states: Vec::new(),
        slots: vec![open_slot, local_slot],
        ops,
        widths: vec![32, 32, 16, 16, 16, 32, 32, 32, 10],
    }
}

const TABLE: u64 = 10 * 32 * 2;
const VECTORS: u64 = 32 * 4 + 16 * 4;
const MATRICES: u64 = 16 * 34 + 16 * 18;

#[test]
fn sums_by_hand() {
    let wanted = Cost {
        weight_bytes: 2 * TABLE + VECTORS + MATRICES,
        parameters: 2 * 320 + 32 + 512 + 16 + 512,
        // A row of the table, and the matrix that two operations read once only.
        step_weight_bytes: 64 + TABLE + VECTORS + MATRICES,
        step_expert_bytes: 0,
        flops_per_token: 2 * (3 * 512 + 320),
    };
    let plan = plan(WeightId(5));
    assert_eq!(plan.cost(), wanted);
    // One slot holds everything, the other the last five tokens.
    assert_eq!(plan.kv_elements(3), 2 * (4 + 8) * (3 + 3));
    assert_eq!(plan.kv_elements(100), 2 * (4 + 8) * (100 + 5));
}

#[test]
fn a_tied_table_is_read_as_the_head_too() {
    let mut plan = plan(WeightId(0));
    plan.weights.pop();
    assert_eq!(plan.cost().weight_bytes, TABLE + VECTORS + MATRICES);
    assert_eq!(plan.cost().step_weight_bytes, 64 + TABLE + VECTORS + MATRICES);
}

/// A token uses two of four experts: half of their weights and biases are read. The matrices of a
/// product without a choice are all read, and of tables by position or of one row a row each.
#[test]
fn only_chosen_experts_are_read() {
    let mut plan = plan(WeightId(5));
    let (gating, groups, groups_used) = (Gating::Softmax, 1, 1);
    let (normalize, scale) = (false, 1.0);
    let routing = Routing { experts: 4, used: 2, gating, groups, groups_used, normalize, scale };
    plan.weights.extend([
        weight("router", Format::F32, 4, 32),
        weight("experts", Format::Q8_0, 4 * 16, 32),
        weight("experts.bias", Format::F32, 4, 16),
        weight("heads", Format::F16, 4 * 8, 8),
        weight("positions", Format::F16, 64, 32),
    ]);
    let before = plan.cost();
    let head = plan.ops.pop().expect("the head is last");
    let experts = |input, route, weight, bias| Op::ExpertLinear {
        input: Value(input),
        route,
        weight: WeightId(weight),
        bias,
        experts: 4,
    };
    plan.ops.extend([
        Op::Linear { input: Value(7), weight: WeightId(6), bias: None },
        Op::Route { chosen: None, input: Value(8), bias: None, routing },
        experts(7, Some(Value(9)), 7, Some(WeightId(8))),
        experts(10, None, 9, None),
        Op::Embed { table: WeightId(10), by: EmbedBy::Position },
        Op::Embed { table: WeightId(10), by: EmbedBy::First },
        head,
    ]);
    plan.widths.splice(8.., [4, 4, 32, 32, 32, 32, 10]);
    let cost = plan.cost();
    let (router, matrices, biases, heads) = (4 * 32 * 4, 64 * 34, 4 * 16 * 4, 32 * 8 * 2);
    let added = router + matrices / 2 + biases / 2 + heads + 2 * 32 * 2;
    assert_eq!(cost.step_weight_bytes - before.step_weight_bytes, added);
    assert_eq!(cost.step_expert_bytes, matrices / 2 + biases / 2);
    let products = 4 * 32 + 2 * 16 * 32 + 32 * 8;
    assert_eq!(cost.flops_per_token - before.flops_per_token, 2 * products);
    assert_eq!(cost.weight_bytes, before.weight_bytes, "all weights were there before");
}

#[test]
fn windows_are_listed_once_in_order_of_use() {
    let mut plan = plan(WeightId(5));
    assert_eq!(plan.windows(), [None, Some(5)]);
    plan.slots.extend([plan.slots[1], plan.slots[0]]);
    plan.slots.swap(0, 1);
    assert_eq!(plan.windows(), [Some(5), None]);
}

#[test]
fn buffers_by_hand() {
    let buffers = plan(WeightId(5)).buffers();
    // The table's row, its norm, then queries, keys and values, of which the queries take over
    // from the row; both results of attention; their sum in the place of a value now dead.
    assert_eq!(buffers.of_value[8], None);
    assert_eq!(buffers.of_value[2], buffers.of_value[0]);
    let living = [
        buffers.of_value[2],
        buffers.of_value[3],
        buffers.of_value[4],
        buffers.of_value[5],
        buffers.of_value[6],
    ];
    let mut distinct = living.to_vec();
    distinct.sort();
    distinct.dedup();
    assert_eq!(distinct.len(), living.len(), "all live when the second attention runs");
    assert_eq!(buffers.bytes(2), 2 * 4 * buffers.widths.iter().sum::<usize>() as u64);
}
