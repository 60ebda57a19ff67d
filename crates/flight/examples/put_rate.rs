//! How fast rows go to a store: made-up vectors, sent as `bodkin embed --flight` sends them.
//!
//!     cargo run --release -p bodkin-flight --example put_rate -- DATA META ROWS DIMENSION

use std::sync::Arc;
use std::time::{Duration, Instant};

use bodkin_flight::store::{Address, Upload, UploadOptions};
use bodkin_flight::{Columns, Row};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [data, meta, rows, dimension] = args.as_slice() else {
        return Err("expected DATA META ROWS DIMENSION".into());
    };
    let (rows, dimension): (u64, usize) = (rows.parse()?, dimension.parse()?);
    let timeout = Duration::from_secs(60);
    let address = Address { data: data.clone(), meta: meta.clone(), api_key: None, timeout };
    let options = UploadOptions {
        address,
        dataset: "rate".to_owned(),
        resume: false,
        batch_rows: 4096,
        stop: Arc::default(),
        note: Arc::new(|note| eprintln!("{note}")),
    };
    let mut upload = Upload::begin(options, dimension)?;
    let mut vector = vec![0.5; dimension];
    let start = Instant::now();
    for number in 0..rows {
        vector[0] = number as f32;
        upload.push(Row { number, text: "", columns: Columns::None, vector: &vector })?;
    }
    upload.send_all()?;
    let seconds = start.elapsed().as_secs_f64();
    let megabytes = (rows * 4 * dimension as u64) as f64 / 1e6;
    println!("{rows} rows of {dimension}: {:.0} MB/s of vectors", megabytes / seconds);
    let landed = upload.finish()?;
    println!("{landed:?}");
    if let Ok(status) = std::fs::read_to_string("/proc/self/status") {
        let peak = status.lines().find(|line| line.starts_with("VmHWM"));
        println!("{}", peak.unwrap_or_default());
    }
    Ok(())
}
