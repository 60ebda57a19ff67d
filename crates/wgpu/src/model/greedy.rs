//! Steps whose tokens are the largest logits: the device finds them, so that no logits come back.
//! In multi-step decode it copies them to the data of the next step, which is sent before the host
//! has seen them: it runs ahead.

use std::collections::VecDeque;
use std::time::Instant;

use bodkin_backend::{
    Activity, Batch, Interval, OutputRequest, Result, Sink, Step, StepOutput, Track,
};

use super::WgpuModel;

/// What `argmax.wgsl` writes where there is no token.
const NO_TOKEN: u32 = u32::MAX;

/// A step that was sent, and the number of the buffer for its tokens.
struct Sent {
    submission: wgpu::SubmissionIndex,
    buffer: usize,
    start: Instant,
}

impl WgpuModel {
    /// Whether the device finds the tokens of a step.
    pub(super) fn is_greedy(&self, step: &Step<'_>) -> bool {
        let is_argmax = |row: &OutputRequest<'_>| match row {
            OutputRequest::Token(params) => params.temperature <= 0.0 && !params.adjusts_logits(),
            OutputRequest::Logits => false,
        };
        step.observer.is_none()
            && self.profile.is_none()
            && !step.requests.is_empty()
            && step.requests.iter().all(is_argmax)
    }

    /// Runs such a step, see [`bodkin_backend::Model::step`].
    pub(super) fn step_greedy(&mut self, step: &Step<'_>, sink: Sink<'_>) -> Result<()> {
        self.host.check(step)?;
        self.gpu.check()?;
        let run = self.send_and_sink(step, sink);
        // What was sent ahead still reads the buffers.
        let finished = self.gpu.run(None);
        run.and(finished)
    }

    fn send_and_sink(&mut self, step: &Step<'_>, sink: Sink<'_>) -> Result<()> {
        // A recurrent state cannot go back to where it was before a step.
        let ahead = usize::from(self.plan.states.is_empty());
        let mut next = std::mem::take(&mut self.next);
        next.clone_from(step.batch);
        let mut sent = VecDeque::with_capacity(2);
        let mut count = 0;
        let mut result = Ok(());
        for seen in 0..step.steps {
            while count < step.steps && count <= seen + ahead && result.is_ok() {
                match self.send_greedy(&next, count) {
                    Ok(step) => sent.push_back(step),
                    Err(error) => result = Err(error),
                }
                next.spans.iter_mut().for_each(|span| span.position += 1);
                count += 1;
            }
            result =
                result.and_then(|()| self.receive_tokens(sent.pop_front(), step.requests.len()));
            let is_over = result.is_err()
                || sink(StepOutput { tokens: &self.tokens, logits: &mut [] }).is_break()
                || self.tokens.contains(&None);
            if is_over {
                break;
            }
        }
        self.next = next;
        result
    }

    /// Sends step `nth` of a call. Those after the first have the tokens of the one before.
    fn send_greedy(&mut self, batch: &Batch, nth: usize) -> Result<Sent> {
        let start = Instant::now();
        self.send(batch)?;
        let descriptor = wgpu::CommandEncoderDescriptor { label: Some("greedy step") };
        let mut encoder = self.gpu.device.create_command_encoder(&descriptor);
        let tokens = &self.buffers.tokens;
        if nth > 0 {
            for (i, &row) in batch.outputs.iter().enumerate() {
                let to = self.data.token_at(row as usize);
                encoder.copy_buffer_to_buffer(tokens, 4 * i as u64, &self.batch.0, to, 4);
            }
        }
        self.record(&mut encoder, 0..self.ready.len());
        let buffer = nth % 2;
        let bytes = 4 * batch.outputs.len() as u64;
        encoder.copy_buffer_to_buffer(tokens, 0, &self.received[buffer], 0, bytes);
        let submission = self.gpu.queue.submit([encoder.finish()]);
        self.gpu.check()?;
        Ok(Sent { submission, buffer, start })
    }

    /// Waits for a step, and reads its tokens.
    fn receive_tokens(&mut self, sent: Option<Sent>, rows: usize) -> Result<()> {
        let Sent { submission, buffer, start } = sent.expect("a step was sent for each");
        let tokens = &mut self.tokens;
        tokens.clear();
        self.gpu.read(&self.received[buffer], 4 * rows as u64, Some(submission), |bytes| {
            let words: &[u32] = bytemuck::cast_slice(bytes);
            tokens.extend(words.iter().map(|&token| (token != NO_TOKEN).then_some(token)));
        })?;
        if let Some(trace) = &mut self.trace {
            // The device is busy with the step before until that ends.
            let before = trace.last().map_or(start, |interval| interval.end);
            trace.push(Interval {
                track: Track::Device(0),
                activity: Activity::Compute,
                name: "step".into(),
                start: start.max(before),
                end: Instant::now(),
            });
        }
        Ok(())
    }
}
