-- enqueue, plainly: segments only, so that no job is looked at.
do
  local entries, segs = ARGV[3], #ARGV[3] / 14
  local is_plain = segs > 0
  for n = 1, segs do is_plain = is_plain and byte(entries, 14 * n - 13) == 0 end
  local counters = is_plain and is_new(ARGV[1]) and plain_counters()
  if counters then
    local stamp, jobs = pack('<I8', now), 0
    for n = 1, segs do
      local line = byte(entries, 14 * n - 12) * 2 + 1
      local count = read('<I2', entries, 14 * n - 7)
      call('RPUSH', KEYS[FIRST_LINE + line], sub(entries, 14 * n - 11, 14 * n) .. stamp .. ARGV[n + 3])
      counters[IN_LINE + line] = counters[IN_LINE + line] + count
      jobs = jobs + count
    end
    counters[N_READY] = counters[N_READY] + jobs
    counters[ENQUEUED] = counters[ENQUEUED] + jobs
    keep_answer(ARGV[1], '\0\0\0\0')
    keep_counters(counters)
    wake(SLEEP, jobs, 'j')
    return pack('<I1I8I1I4', 0, now, 0, 0)
  end
end
