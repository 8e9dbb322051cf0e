/** Print the verdicts of the peer's reader on the groups of a kit, as one JSON array: `node check_kit.mjs messages.json` */
import fs from 'node:fs'
import { openEnvelope } from '../../examples/node-peer/rollout.js'

const { node, groups } = JSON.parse(fs.readFileSync(process.argv[2]))
const verdictOf = ({ data }) => {
  try {
    openEnvelope(Buffer.from(data, 'hex'), Buffer.from(node.run, 'hex'))
    return 'accepted'
  } catch (error) {
    return error.reason ?? String(error)
  }
}
console.log(JSON.stringify(groups.map(verdictOf)))
