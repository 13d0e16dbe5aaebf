-- enqueue, plainly: segments only, so that no job is looked at.
do
  local items, at, segs, froms, tills = ARGV[3], 1, 0, {}, {}
  while at <= #items and byte(items, at) == 0 do
    segs = segs + 1
    froms[segs] = at + 1
    at = at + 1 + read('<I4', items, at + 1)
    tills[segs] = at - 1
  end
  local counters = at > #items and is_new(ARGV[1]) and plain_counters()
  if counters then
    local stamp, jobs = pack('<I8', now), 0
    for n = 1, segs do
      local from = froms[n]
      local count = read('<I2', items, from + 4)
      local line = byte(items, from + 25 + 16 * count) * 2 + 1
      call('RPUSH', KEYS[FIRST_LINE + line], sub(items, from, from + 11) .. stamp .. sub(items, from + 20, tills[n]))
      counters[IN_LINE + line] = counters[IN_LINE + line] + count
      jobs = jobs + count
    end
    counters[N_READY] = counters[N_READY] + jobs
    counters[ENQUEUED] = counters[ENQUEUED] + jobs
    keep_answer(ARGV[1], '\0\0\0\0')
    keep_counters(counters)
    if jobs > 0 then wake(SLEEP, jobs, 'j') end
    return pack('<I1I8I1I4', 0, now, 0, 0)
  end
end
