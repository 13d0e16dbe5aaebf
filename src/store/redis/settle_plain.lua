-- settle, plainly: runs only.
do
  local counters = is_new(ARGV[1]) and plain_counters()
  local grants, verdicts = nil, nil
  if counters then grants, verdicts = plain_runs(ARGV[2]) end
  if grants then
    end_runs(grants, counters)
    keep_answer(ARGV[1], verdicts)
    keep_counters(counters)
    return pack('<I1I8I1', 0, now, 0) .. verdicts
  end
end
