/** The run's directory: its manifest and its members, each in an entry that its owner signed. */
import { createHash } from 'node:crypto'
import { inflateSync } from 'node:zlib'
import { ExtensionCodec, decode, encode } from '@msgpack/msgpack'
import { isSignedBy, peerIdText } from './identity.js'
import { shortHash } from './rollout.js'
import { find } from './streams.js'

const DIRECTORY_DOMAIN = 'ftis-node/directory/1\n'
const KIND = { member: 2, manifest: 3 }
const [HEAD_BYTES, NUM_BUCKETS, CALL_KEYS, MAX_MANIFEST_BYTES] = [112, 64, 16, 65536]
const extensionCodec = new ExtensionCodec()
extensionCodec.register({ type: 0x50, decode: (data) => decode(data)[2] })
const keyId = (key) => createHash('sha1').update(encode(key)).digest()

/** Return the run's manifest. Throws if the directory has none whose hash is the run id. */
export async function readManifest (node, peer, run) {
  const [result] = await find(node, peer, [keyId(`/ftis/1/${run}/manifest`)])
  if (!result.value?.length) throw new Error('the directory has no manifest of this run')
  const { payload } = openEntry(Buffer.from(decode(result.value)), KIND.manifest, run)
  const canonical = inflateSync(payload, { maxOutputLength: MAX_MANIFEST_BYTES })
  if (shortHash(canonical).toString('hex') !== run) throw new Error('the manifest of another run')
  return JSON.parse(canonical)
}

/** Return the addresses of each member of the run, by peer id. */
export async function readMembers (node, peer, run) {
  const keys = Array.from({ length: NUM_BUCKETS }, (_, bucket) => keyId(`/ftis/1/${run}/members/${bucket}`))
  const members = new Map()
  for (let first = 0; first < NUM_BUCKETS; first += CALL_KEYS) {
    for (const result of await find(node, peer, keys.slice(first, first + CALL_KEYS))) {
      if (result.type !== 2) continue
      for (const [subkey, value] of decode(result.value, { extensionCodec })) {
        const entry = openEntry(Buffer.from(decode(value)), KIND.member, run)
        if (subkey !== entry.peer) throw new Error('an entry at a wrong subkey')
        members.set(entry.peer, entry.payload.toString().trim().split('\n').slice(1))
      }
    }
  }
  return members
}

/** Return the owner and the payload of an entry. Throws if it is not of this kind and run, has expired, or is unsigned. */
function openEntry (entry, kind, run) {
  const [peer, expiry, signature] = [entry.subarray(1, 39), entry.subarray(39, 47), entry.subarray(47, 111)]
  const runEnd = HEAD_BYTES + entry[HEAD_BYTES - 1]
  const payload = entry.subarray(runEnd)
  const signed = Buffer.concat([entry.subarray(0, 1), expiry, Buffer.from(`${run}\n`), payload])
  if (entry[0] !== kind || entry.toString('latin1', HEAD_BYTES, runEnd) !== run) throw new Error('another entry')
  if (expiry.readDoubleBE() * 1000 < Date.now()) throw new Error('an expired entry')
  if (!isSignedBy(peer, DIRECTORY_DOMAIN, signed, signature)) throw new Error('a signature of another peer')
  return { peer: peerIdText(peer), payload }
}
