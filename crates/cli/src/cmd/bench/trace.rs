//! The timelines of tests for Chrome (`chrome://tracing`) and Perfetto.

use std::io::Write;

use anyhow::Result;
use bodkin_backend::Track;
use serde_json::{Value, json};

use super::report::Row;

/// Writes the timelines of all tests; each test is a process of the trace.
pub(crate) fn write(out: &mut dyn Write, rows: &[Row]) -> Result<()> {
    let events: Vec<Value> = (0..).zip(rows).flat_map(|(id, row)| events(id, row)).collect();
    serde_json::to_writer(&mut *out, &json!({ "displayTimeUnit": "ns", "traceEvents": events }))?;
    Ok(writeln!(out)?)
}

/// The names of a test and its tracks, and the parts of its run. Times are in microseconds.
fn events(id: usize, row: &Row) -> Vec<Value> {
    let named = |kind: &str, track: usize, name: &str| {
        let arguments = json!({ "name": name });
        json!({ "name": kind, "ph": "M", "pid": id, "tid": track, "args": arguments })
    };
    let test = format!("{} on {}: a run of {} steps", row.test(), row.backend, row.steps);
    let mut events = vec![named("process_name", 0, &test)];
    let tracks = row.timeline.tracks();
    for (i, track) in tracks.iter().enumerate() {
        let name = match track {
            Track::Host => "host".to_owned(),
            Track::Thread(number) => format!("thread {number}"),
            Track::Device(number) => format!("device {number}"),
        };
        events.push(named("thread_name", i, &name));
    }
    events.extend(row.timeline.parts.iter().map(|part| {
        let track = tracks.iter().position(|track| *track == part.track);
        json!({
            "name": part.name, "cat": part.kind.name(), "ph": "X", "pid": id, "tid": track,
            "ts": 1e6 * part.start, "dur": 1e6 * (part.end - part.start),
        })
    }));
    events
}
