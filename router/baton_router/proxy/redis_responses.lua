-- The store of responses in Redis: the rules of baton_api.response_store, each command as one transaction.
--
-- ARGV: command, now (seconds of the Unix epoch), arguments of the command. Owners, and the ids of responses
-- and items, are hexadecimal digests. "meta" is a MessagePack map, written once: uid, before (uid or ""), size,
-- items (by their ids, start and length within the record), and what only the router reads.

local DATA, EXPIRY, ORDER, COUNTS, SIZES, ITEMS = unpack(KEYS)
-- DATA, a hash: meta:UID, record:UID and holders:UID (reference count) of each turn; response:OWNER:ID, which is
--   "NUMBER UID"; size (bytes of all turns) and number (of the last stored response).
-- EXPIRY: OWNER:ID by time. ORDER: OWNER:NUMBER:ID, by name. COUNTS and SIZES: OWNER by responses and bytes.
-- ITEMS: OWNER:ITEM:NUMBER:UID, by name: which turns have an item, the newest last.

local call = redis.call

local function meta_of(uid)
  return cmsgpack.unpack(call('HGET', DATA, 'meta:' .. uid))
end

local function add(set, owner, amount)
  if tonumber(call('ZINCRBY', set, amount, owner)) == 0 then call('ZREM', set, owner) end
end

local function resize(owner, bytes)
  call('HINCRBY', DATA, 'size', bytes)
  add(SIZES, owner, bytes)
end

-- The number and the uid of a response; nil if there is none.
local function find(owner, id)
  return string.match(call('HGET', DATA, 'response:' .. owner .. ':' .. id) or '', '^(%d+) (.+)$')
end

local function drop(owner, id)
  local number, uid = find(owner, id)
  for item in pairs(meta_of(uid).items) do
    call('ZREM', ITEMS, table.concat({owner, item, number, uid}, ':'))
  end
  call('HDEL', DATA, 'response:' .. owner .. ':' .. id)
  call('ZREM', EXPIRY, owner .. ':' .. id)
  call('ZREM', ORDER, table.concat({owner, number, id}, ':'))
  add(COUNTS, owner, -1)
  while uid ~= '' and call('HINCRBY', DATA, 'holders:' .. uid, -1) == 0 do
    local meta = meta_of(uid)
    call('HDEL', DATA, 'holders:' .. uid, 'meta:' .. uid, 'record:' .. uid)
    resize(owner, -meta.size)
    uid = meta.before
  end
end

-- Drop the oldest response of the owner that has most.
local function evict(set)
  local owner = call('ZREVRANGE', set, 0, 0)[1]
  local oldest = call('ZRANGEBYLEX', ORDER, '[' .. owner .. ':', '(' .. owner .. ';', 'LIMIT', 0, 1)[1]
  drop(owner, string.match(oldest, '^.*:%d+:(.*)$'))
end

local function expire(now)
  for _, key in ipairs(call('ZRANGEBYSCORE', EXPIRY, '-inf', now)) do
    drop(string.match(key, '^(.*):(.*)$'))
  end
end

local commands = {}

-- Arguments from 3: owner, id, time of expiry, time to live (ms), limits of responses and bytes, and turns, each as
-- meta and record: the new one, and then those that it continues, or none of these. Returns 0, and stores nothing,
-- if none are given and the store does not have them any more.
function commands.put()
  local owner, id, expiry, ttl = ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])
  local responses, bytes = tonumber(ARGV[7]), tonumber(ARGV[8])
  local last = cmsgpack.unpack(ARGV[#ARGV - 1])
  if last.before ~= '' and call('HEXISTS', DATA, 'holders:' .. last.before) == 0 then return 0 end

  local uid = cmsgpack.unpack(ARGV[9]).uid
  local at, turn = 9, uid
  while turn ~= '' and call('HINCRBY', DATA, 'holders:' .. turn, 1) == 1 do
    local meta = cmsgpack.unpack(ARGV[at])
    call('HSET', DATA, 'meta:' .. turn, ARGV[at], 'record:' .. turn, ARGV[at + 1])
    resize(owner, meta.size)
    at, turn = at + 2, meta.before
  end

  if find(owner, id) then drop(owner, id) end
  local number = string.format('%016d', call('HINCRBY', DATA, 'number', 1))
  call('HSET', DATA, 'response:' .. owner .. ':' .. id, number .. ' ' .. uid)
  call('ZADD', EXPIRY, expiry, owner .. ':' .. id)
  call('ZADD', ORDER, 0, table.concat({owner, number, id}, ':'))
  add(COUNTS, owner, 1)
  for item in pairs(meta_of(uid).items) do
    call('ZADD', ITEMS, 0, table.concat({owner, item, number, uid}, ':'))
  end

  while call('ZCARD', EXPIRY) > responses do evict(COUNTS) end
  while tonumber(call('HGET', DATA, 'size')) > bytes do evict(SIZES) end

  -- All keys end together, when no router has dropped what they have.
  for _, key in ipairs(KEYS) do
    if call('PTTL', key) < ttl then call('PEXPIRE', key, ttl) end
  end
  return 1
end

-- Arguments: owner, id. Returns meta and record of the response and of all that it continues, the newest first.
function commands.get()
  local result = {}
  local _, uid = find(ARGV[3], ARGV[4])
  while uid and uid ~= '' do
    local packed = call('HGET', DATA, 'meta:' .. uid)
    table.insert(result, packed)
    table.insert(result, call('HGET', DATA, 'record:' .. uid))
    uid = cmsgpack.unpack(packed).before
  end
  return result
end

-- Arguments: owner, items. Returns each item of the newest response that has it; nil without one.
function commands.items()
  local result = {}
  for at = 4, #ARGV do
    local name = ARGV[3] .. ':' .. ARGV[at]
    local newest = call('ZREVRANGEBYLEX', ITEMS, '(' .. name .. ';', '[' .. name .. ':', 'LIMIT', 0, 1)[1]
    result[at - 3] = false
    if newest then
      local uid = string.match(newest, '([^:]*)$')
      local start, length = unpack(meta_of(uid).items[ARGV[at]])
      result[at - 3] = string.sub(call('HGET', DATA, 'record:' .. uid), start + 1, start + length)
    end
  end
  return result
end

-- Arguments: owner, id. Returns whether there was such a response.
function commands.delete()
  if not find(ARGV[3], ARGV[4]) then return 0 end
  drop(ARGV[3], ARGV[4])
  return 1
end

-- A Redis that is full may have evicted some of the keys: the others mean nothing without them.
if call('EXISTS', DATA, EXPIRY, ORDER, COUNTS, SIZES) < 5 then call('DEL', unpack(KEYS)) end
expire(ARGV[2])
return commands[ARGV[1]]()
