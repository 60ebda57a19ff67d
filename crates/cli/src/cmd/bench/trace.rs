//! A trace of the stages of a step for Chrome (`chrome://tracing`) and Perfetto: the mean over the
//! steps of a run, for each test.

use std::io::Write;

use anyhow::Result;
use serde_json::{Value, json};

use super::report::Row;

/// Writes the trace of all tests; each test is a process of the trace.
pub(crate) fn write(out: &mut dyn Write, rows: &[Row]) -> Result<()> {
    let events: Vec<Value> = (0..).zip(rows).flat_map(|(id, row)| events(id, row)).collect();
    serde_json::to_writer(&mut *out, &json!({ "displayTimeUnit": "ns", "traceEvents": events }))?;
    Ok(writeln!(out)?)
}

/// The name of a test, and its stages in sequence. Times are in microseconds.
fn events(id: usize, row: &Row) -> Vec<Value> {
    let name = format!("{} on {}: the mean of {} steps", row.test(), row.backend, row.steps);
    let named = json!({
        "name": "process_name", "ph": "M", "pid": id, "tid": 0, "args": { "name": name },
    });
    let steps = row.steps.max(1);
    let mut events = vec![named];
    let mut start = 0.0;
    for stage in &row.stages {
        let micros = stage.seconds * 1e6 / steps as f64;
        events.push(json!({
            "name": stage.name, "cat": "stage", "ph": "X", "pid": id, "tid": 0,
            "ts": start, "dur": micros,
            "args": {
                "bytes": stage.bytes / steps as u64,
                "operations": stage.operations / steps as u64,
            },
        }));
        start += micros;
    }
    events
}
