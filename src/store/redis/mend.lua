-- census: some of the jobs, and whether each is where JOBS says that it is.
-- in   1 cursor · 2 how many, about
-- out  [u32 bytes looked at], [16 id][9 state and place] of jobs in line and of those that are
--      missing somewhere; R for one in line whose key nobody holds; then the next cursor and its
--      length. Who is in line the caller compares with the lines
-- why  JOBS is the truth: whatever else a server lost can be made from it
local function member_of_park(place, id, rec) return line_of_key(parse(rec).exclusive) .. place .. id end
local function is_missing(state, place, id, stands)
  if state == 's' then return not call('ZSCORE', K.due, place .. id) end
  if state == 'l' then
    return call('HEXISTS', K.held, place .. ROLL) == 0 or not call('ZSCORE', K.ends, place)
  end
  if K[state] then
    return not call('ZSCORE', K[state], place .. id)
      or (u8(stands, 18) < NEVER and not call('ZSCORE', K.keep, id))
  end
  return state == 'p' and not call('ZSCORE', K.park, member_of_park(place, id, record_in(stands)))
end
-- Until when a job's unique key is held, once it has been given: false if it is free again.
local function held_until(state, rec, p)
  if not p.window then return not K[state] and NEVER end
  local till = u8(rec, ENQUEUED_AT) + p.window
  return till > now and till
end
-- Whether a key that the job should hold is held by nobody.
local function is_unheld(state, stands)
  local rec = record_in(stands)
  if not has(flags_of(rec), UNIQUE + EXCLUSIVE) then return false end
  local p = parse(rec)
  return (p.unique and held_until(state, rec, p) and call('HEXISTS', K.uniq, p.unique) == 0)
    or (p.exclusive and state ~= 's' and not K[state] and call('HEXISTS', K.excl, p.exclusive) == 0)
end
local function scanned(rows, cursor) return reply(DONE, rows .. cursor .. char(#cursor)) end
local function census()
  local answer = call('HSCAN', K.jobs, ARGS[1], 'COUNT', ARGS[2])
  local rows, found, bytes = {}, answer[2], 0
  for n = 1, #found, 2 do
    local id, stands = found[n], found[n + 1]
    local state, place = sub(stands, 1, 1), sub(stands, 2, 9)
    local is_bare = is_unheld(state, stands)
    if state == 'r' or is_bare or is_missing(state, place, id, stands) then
      rows[#rows + 1] = id .. state .. place
    end
    if state == 'r' and is_bare then rows[#rows + 1] = id .. 'R' .. place end
    bytes = bytes + #stands
  end
  return scanned(pack('<I4', bytes) .. concat(rows), answer[1])
end
register('census', census, { 'no-writes', 'allow-oom' })

-- leases: live leases, by the ledger and by the grants.
-- in   1 cursor · 2 how many grants, about
-- out  [u64 granted][u64 ended], n × [8 grant][u16 alive], the next cursor and its length
-- why  the caller adds up; if the first two were the same in all steps, so were the leases
local function leases()
  local fields, ended = call('HMGET', K.meta, 'granted', unpack(ENDINGS)), 0
  for n = 2, #ENDINGS + 1 do ended = ended + (tonumber(fields[n]) or 0) end
  local answer, ids, rows = call('ZSCAN', K.ends, ARGS[1], 'COUNT', ARGS[2]), {}, {}
  for n = 1, #answer[2], 2 do ids[#ids + 1] = answer[2][n] end
  for from = 1, #ids, 1000 do
    for n, head in ipairs(call('HMGET', K.held, unpack(ids, from, min(from + 999, #ids)))) do
      if head then rows[#rows + 1] = ids[from + n - 1] .. sub(head, HEAD_LIVE, HEAD_LIVE + 1) end
    end
  end
  return scanned(p8(tonumber(fields[1]) or 0) .. p8(ended) .. concat(rows), answer[1])
end
register('leases', leases, { 'no-writes', 'allow-oom' })

-- mend: put jobs back to where JOBS says that they are.
-- in   1 n × [16 id][9 state and place], as census had them · 2 look: only say what is the case;
--      mend: do it
-- out  [u64] how many are still as they were
-- why  what has moved on since it was looked at is left alone
local function mend_one(id, state, place, rec, stands, keys_only)
  local p = parse(rec)
  local till = p.unique and held_until(state, rec, p)
  if till and call('HSETNX', K.uniq, p.unique, p.window and id .. p8(till) or id) == 1 and p.window then
    call('ZADD', K.uwin, till, p.unique)
  end
  local is_head = p.exclusive and (state == 'r' or state == 'l' or state == 'p')
    and call('HSETNX', K.excl, p.exclusive, id) == 1
  if state == 'r' and not keys_only then
    put_back(rec)
  elseif state == 'p' and is_head then
    call('ZREM', K.park, member_of_park(place, id, rec))
    put_back(rec)
  elseif not is_missing(state, place, id, stands) then
    return
  elseif state == 's' then
    call('ZADD', K.due, u8(rec, RUN_AT), place .. id)
    set('due', 1)
  elseif state == 'p' then
    call('ZADD', K.park, 0, member_of_park(place, id, rec))
  elseif state == 'l' then
    local g = held(place)
    if g then
      call('ZADD', K.ends, g.deadline, place)
    else
      -- Nobody can show that the lease still lives: it ends here.
      add('expired_deadline', 1)
      put_back(rec)
    end
  else
    call('ZADD', K[state], u8(stands, 10), place .. id)
    if u8(stands, 18) < NEVER then call('ZADD', K.keep, u8(stands, 18), id) end
  end
end
local function mend()
  local data, how, still = ARGS[1], ARGS[2], 0
  for at = 1, #data, 25 do
    local id, state, place = sub(data, at, at + 15), sub(data, at + 16, at + 16), sub(data, at + 17, at + 24)
    local keys_only = state == 'R'
    if keys_only then state = 'r' end
    local stands = call('HGET', K.jobs, id)
    if stands and sub(stands, 1, 9) == state .. place then
      still = still + 1
      if how == 'mend' then mend_one(id, state, place, record_in(stands), stands, keys_only) end
    end
  end
  save_meta()
  wake()
  return reply(DONE, p8(still))
end
register('mend', mend, { 'allow-oom' })

-- orphans: what is left of jobs and keys that are gone.
-- in   1 cursor · 2 how many, about · 3 which key to go through · 4 look or mend
-- out  [u64] how many [u32 bytes looked at]; then the next cursor and its length
-- why  UNIQ has the end of a window, too; a holder that was lost is known to nobody
local orphan, bytes = {}, 0
local STATE_IN = { due = 's', park = 'p', done = 'c', dead = 'd', gone = 'x' }
-- A job that was lost may be there again under its id, in another place.
local function is_of_lost_job(set, member, mends)
  local stands = call('HGET', K.jobs, sub(member, -16))
  bytes = bytes + #(stands or '')
  if set == 'keep' and kept_till(stands) or set ~= 'keep' and is_at(stands, STATE_IN[set], member) then
    return false
  end
  if mends then
    call('ZREM', K[set], member)
    if set ~= 'keep' then add('lost_jobs', 1) end
  end
  return true
end
local function has_key(id, which, key)
  local stands = call('HGET', K.jobs, id)
  bytes = bytes + #(stands or '')
  return stands and parse(record_in(stands))[which] == key
end
function orphan.excl(key, holder, mends)
  if has_key(holder, 'exclusive', key) then return false end
  if mends then free_exclusive(holder, { exclusive = key }) end
  return true
end
function orphan.uniq(key, holder, mends)
  local has_window = #holder > 16
  if has_window and call('ZSCORE', K.uwin, key) or not has_window and has_key(holder, 'unique', key) then
    return false
  end
  if mends and has_window then call('ZADD', K.uwin, u8(holder, 17), key) end
  if mends and not has_window then call('HDEL', K.uniq, key) end
  return true
end
function orphan.uwin(key, _, mends)
  if call('HEXISTS', K.uniq, key) == 1 then return false end
  if mends then
    call('ZREM', K.uwin, key)
    add('lost_keys', 1)
  end
  return true
end
local function orphans()
  local which, mends, count = ARGS[3], ARGS[4] == 'mend', 0
  bytes = 0
  local is_hash = which == 'excl' or which == 'uniq'
  local answer = call(is_hash and 'HSCAN' or 'ZSCAN', K[which], ARGS[1], 'COUNT', ARGS[2])
  for n = 1, #answer[2], 2 do
    local member, value, is_orphan = answer[2][n], answer[2][n + 1], nil
    if orphan[which] then
      is_orphan = orphan[which](member, value, mends)
    else
      is_orphan = is_of_lost_job(which, member, mends)
    end
    if is_orphan then count = count + 1 end
  end
  save_meta()
  wake()
  return scanned(p8(count) .. pack('<I4', bytes), answer[1])
end
register('orphans', orphans, { 'allow-oom' })

-- recount: correct the books.
-- in   1 by how many leases the ledger has too many · 2… of each loss, how many have been reported
-- out  nothing
-- why  all of it is added, so that what is counted meanwhile stays counted
local function recount()
  add('granted', -tonumber(ARGS[1]))
  for n, name in ipairs(LOST_COUNTS) do add(name, -tonumber(ARGS[n + 1])) end
  set('lines', ALL_LINES)
  save_meta()
  return reply(DONE)
end
register('recount', recount, { 'allow-oom' })
