//! A resource that is written to, or read, before it has been opened.
use leasehold::fence::file::FencedFile;
use leasehold::fence::memory::Cell;

fn mistake(cell: &mut Cell<u64>, file: &mut FencedFile) {
    cell.write(|value| *value += 1);
    drop(cell.read());
    drop(file.write(|content| content));
    drop(file.read());
}

fn main() {
    let _ = mistake;
}
